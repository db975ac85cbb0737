"""Compiles the device kernels for a GPU, even without one, and prints the size of each program.

test_device_ops.py runs it.
"""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdmesh.kv.device import digest_kernel
from pdmesh.kv.device import kernels as device_kernels

CONSTANTS = {"head_words": 2048, "run_words": 64, "inner_count": 16, "tile": 1024}


def main() -> None:
    kernel = device_kernels._move
    for word_bytes, name in ((8, "i64"), (4, "i32"), (2, "i16"), (1, "i8")):
        for is_gather in (True, False):
            constants = {
                **CONSTANTS,
                "word": device_kernels._WORDS[word_bytes][0],
                "is_gather": is_gather,
            }
            kinds = {"pointers": "*i64", "block_ids": "*i64", "buffer": f"*{name}"}
            signature = {
                a: "constexpr" if a in constants else kinds.get(a, "i32") for a in kernel.arg_names
            }
            values = {(kernel.arg_names.index(a),): v for a, v in constants.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=values)
            compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
            print(name, is_gather, len(compiled.asm["cubin"]))
    kinds = {"words": "*i64", "sums": "*i64", "num_words": "i32", "tile": "constexpr"}
    at = (digest_kernel._sum.arg_names.index("tile"),)
    source = ASTSource(
        fn=digest_kernel._sum, signature=kinds, constexprs={at: digest_kernel.TILE_WORDS}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    print("digest", None, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
