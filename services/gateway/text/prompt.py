"""A prompt in the form that instances and the master get: token bytes and block names.

A block is the KV of a fixed number of tokens. Its name is a keyed hash of all tokens up to the end
of the block. So if two prompts of a tenant begin equally, their first blocks have equal names.
"""

from __future__ import annotations

import hashlib
import hmac
from array import array
from collections.abc import Iterator, Sequence
from typing import Final

from pdmesh.core.images.prompt_image import PromptImage
from pdmesh.core.kv.prefix.block_hash import block_hashes, tenant_root, tokens_to_bytes
from pdmesh.core.kv.prefix.kept_hashes import CHUNK_BLOCKS, KeptHashes
from pdmesh.core.placement.chat_key import key_of_id
from pdmesh.v1.common_pb2 import InstanceRecord

_STEP_CHUNKS: Final = 4


class Prompt:
    """A prompt's tokens and the hashes of its blocks (S69, S80).

    All answers of a call to this prompt share this object. `data` holds the tokens as little-endian
    uint32. Each full block has a hash of 16 bytes.
    """

    __slots__ = (
        "_adapter", "_hashes", "_places", "_roots", "_salt", "_secret", "_tenant", "data",
        "images", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokens: array[int],
        secret: bytes,
        tenant: str,
        salt: str,
        adapter: str = "",
        images: Sequence[PromptImage] = (),
    ) -> None:
        """`adapter` is the digest of the LoRA adapter with which the prompt is computed, if any."""
        self.tokens, self.images = tokens, images
        self._places = [(image.position, image.digest) for image in images]
        self.data = tokens_to_bytes(tokens)
        self._secret, self._tenant, self._salt, self._adapter = secret, tenant, salt, adapter
        self._roots: dict[str, bytes] = {}
        self._hashes: dict[tuple[str, int], list[bytes]] = {}

    @property
    def digest(self) -> bytes:
        """A keyed hash of tenant and prompt, which reveals nothing about the prompt."""
        key = hmac.digest(self._secret, self._tenant.encode(), "sha256")
        shown = b"".join(digest for _, digest in self._places)
        return hashlib.blake2b(self.data + shown, digest_size=16, key=key).digest()

    def chat_key(self, chat_id: str) -> str:
        """A name for a conversation of this tenant. Empty if `chat_id` is empty."""
        return key_of_id(self._secret, self._tenant, chat_id)

    @property
    def tenant_key(self) -> str:
        """A name for this tenant, which does not depend on the client's cache salt."""
        key = hmac.digest(self._secret, self._tenant.encode(), "sha256")
        return hashlib.blake2b(digest_size=16, key=key, person=b"tenant").hexdigest()

    def root(self, fingerprint: str) -> bytes:
        """The root of the chain of block hashes. Only prompts with the same root share KV."""
        found = self._roots.get(fingerprint)
        if found is None:
            found = tenant_root(self._secret, self._tenant, self._salt, fingerprint, self._adapter)
            self._roots[fingerprint] = found
        return found

    def hashes(self, record: InstanceRecord, replayed: Sequence[int] = ()) -> list[bytes]:
        """Hashes of the full blocks of the prompt and the replayed tokens.

        Replayed tokens are the part of the answer that a new instance computes like a prompt.
        """
        fingerprint, block_size = record.model_fingerprint, record.block_size
        if not block_size:
            return []
        if replayed:
            tokens = self.tokens + array("I", replayed)
            return block_hashes(self.root(fingerprint), tokens, block_size, images=self._places)
        key = (fingerprint, block_size)
        found = self._hashes.get(key)
        if found is None:
            root = self.root(fingerprint)
            found = block_hashes(root, self.tokens, block_size, images=self._places)
            self._hashes[key] = found
        return found

    def hashing(self, record: InstanceRecord, kept: KeptHashes) -> Iterator[None]:
        """Compute the hashes of a long prompt in steps of about a millisecond.

        If the prompt fits in one step or has images, this does nothing, and `hashes` does the work.
        """
        size, key = record.block_size, (record.model_fingerprint, record.block_size)
        step = _STEP_CHUNKS * CHUNK_BLOCKS * size
        if not size or self.images or len(self.tokens) <= step or key in self._hashes:
            return
        hashes: list[bytes] = []
        root = self.root(record.model_fingerprint)
        for number, chunk in enumerate(kept.chunks(root, self.tokens, size), start=1):
            hashes += chunk
            if number % _STEP_CHUNKS == 0:
                yield
        self._hashes[key] = hashes

    def answer_hashes(self, record: InstanceRecord, answer: Sequence[int]) -> list[bytes]:
        """Hashes of the full blocks that the answer completes.

        The answer's last token is left out, because it has no KV yet.
        """
        size, before = record.block_size, self.hashes(record)
        if not size:
            return []
        begun = len(before) * size
        fresh = self.tokens[begun:] + array("I", answer[:-1])
        parent = before[-1] if before else b""
        places = [(at - begun, digest) for at, digest in self._places if at >= begun]
        return block_hashes(self.root(record.model_fingerprint), fresh, size, parent, places)

    def with_replayed(self, replayed: Sequence[int]) -> bytes:
        """The bytes of the prompt's tokens, followed by the bytes of the replayed tokens."""
        return self.data + tokens_to_bytes(replayed) if replayed else self.data
