"""Makes a `tokenizer.json` from a model's tokenizer: tekken, tiktoken, SentencePiece or vocab.json.

The library transformers, which comes with vLLM, converts these formats. It runs in a child process,
because a conversion needs seconds and hundreds of megabytes, and happens only once. No code from
the model's folder is run, so a model whose tokenizer is code needs a `tokenizer.json` beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sys
from pathlib import Path
from typing import Final

from pdmesh.text_files import BadTextFiles, TextFiles, read_text_files

_CONVERT_S: Final = 300.0
_MAX_REASON: Final = 300
_TEKKEN: Final = "tekken.json"
_COPIED: Final = ("config.json", "generation_config.json")


async def converted(source: Path, target: Path) -> TextFiles:
    """Write the converted files of the model in `source` to the empty folder `target`.

    Raises BadTextFiles.
    """
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", __name__, str(source), str(target),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    try:
        async with asyncio.timeout(_CONVERT_S):
            _, errors = await child.communicate()
    except TimeoutError as exc:
        raise BadTextFiles("the tokenizer was not converted in time") from exc
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
    if child.returncode:
        lines = errors.decode(errors="replace").strip().splitlines() or ["it died"]
        raise BadTextFiles(f"the tokenizer cannot be converted: {lines[-1][:_MAX_REASON]}")
    return await asyncio.to_thread(read_text_files, target)


def main() -> None:
    """Runs in the child process."""
    source, target = map(Path, sys.argv[1:])
    tokenizer = _tekken(source) if (source / _TEKKEN).exists() else _any_other(source)
    tokenizer.save_pretrained(str(target))
    for name in _COPIED:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


# The library has no types.
def _tekken(source: Path):  # type: ignore[no-untyped-def]
    """The tokenizer has the chat template of Mistral's library, unless the folder has one.

    A prompt begins with BOS, as in vLLM. The converter of transformers leaves BOS out.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

    found = convert_tekken_tokenizer(str(source / _TEKKEN))
    begin = (found.bos_token, found.bos_token_id)
    found.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{found.bos_token}:0 $A:0", special_tokens=[begin]
    )
    return found


def _any_other(source: Path):  # type: ignore[no-untyped-def]
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(
        str(source), trust_remote_code=False, local_files_only=True
    )


if __name__ == "__main__":
    main()
