"""Computes the vectors and scores of plain vLLM, which is vLLM without the mesh.

This program is a separate process with vLLM's engine, and has no code of the mesh. It reads texts
from one JSON file and writes numbers to another. Arguments: model directory, vLLM's option
`convert`, file of texts, file of numbers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    model, convert, texts_file, numbers_file = sys.argv[1:]
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    }
    from vllm import LLM

    llm = LLM(
        model,
        runner="pooling",
        convert=convert,
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=512 << 20,
        max_num_seqs=8,
    )
    texts = json.loads(Path(texts_file).read_text())
    found: dict[str, object] = {}
    if "embed" in texts:
        found["embed"] = [o.outputs.embedding for o in llm.embed(texts["embed"], use_tqdm=False)]
    query, documents = texts["score"]
    found["score"] = [o.outputs.score for o in llm.score(query, documents, use_tqdm=False)]
    kind = "embed" if "embed" in texts else "score"
    for number, cut in enumerate(texts.get("cuts", ())):
        if kind == "embed":
            made = llm.embed(texts["embed"], use_tqdm=False, tokenization_kwargs=dict(cut))
            found[f"cut {number}"] = [o.outputs.embedding for o in made]
        else:
            scored = llm.score(query, documents, use_tqdm=False, tokenization_kwargs=dict(cut))
            found[f"cut {number}"] = [o.outputs.score for o in scored]
    Path(numbers_file).write_text(json.dumps(found))
    os._exit(0)  # vLLM does not always exit cleanly in process, and nothing is left to do


if __name__ == "__main__":
    main()
