"""A hook of the docs site, which changes links to files outside of the site.

Pages link source files by their path in the repository. `PDMESH_REPOSITORY_URL` is the repository's
address on the web, for example https://example.org/pdmesh/blob/main. Without this variable, such a
link is replaced by its text.
"""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any, Final

REPOSITORY: Final = "PDMESH_REPOSITORY_URL"
_INLINE: Final = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
_REFERENCE: Final = re.compile(r"^\[([^\]]+)\]: (\S+)\n?", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of one page. MkDocs calls this function.

    The type of `page` is Any because MkDocs has no types.
    """
    return linked(markdown, page.file.src_uri, os.environ.get(REPOSITORY, "").rstrip("/"))


def linked(markdown: str, source: str, repository: str) -> str:
    """The page with its links changed.

    `source` is the page's path in docs. `repository` is a URL, or empty.
    """
    outside = {
        label: place
        for label, target in _REFERENCE.findall(markdown)
        if (place := _outside(target, source)) is not None
    }

    def inline(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        place = _outside(target, source)
        return match.group() if place is None else _link(text, place, repository, anchor or "")

    def reference(match: re.Match[str]) -> str:
        return "" if match.group(1) in outside else match.group()

    text = _REFERENCE.sub(reference, _INLINE.sub(inline, markdown))
    for label, place in outside.items():
        alone = re.compile(rf"\[{re.escape(label)}\](?![\[(:])")
        text = _link(label, place, repository).join(alone.split(text))
    return text


def _outside(target: str, source: str) -> str | None:
    """The repository path of a link target outside of docs; None for any other target."""
    if "://" in target or target.startswith(("/", "#", "mailto:")):
        return None
    parts: list[str] = ["docs", *PurePosixPath(source).parent.parts]
    for part in PurePosixPath(target).parts:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return None if parts[:1] == ["docs"] else "/".join(parts)


def _link(text: str, place: str, repository: str, anchor: str = "") -> str:
    return f"[{text}]({repository}/{place}{anchor})" if repository else f"`{text.strip('`')}`"
