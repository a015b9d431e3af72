#!/usr/bin/env python3
"""Writes inst/: one small source file per kernel instance, so that they compile in parallel, and inst/instances.h with
their declarations and tables. TABLE below is the one list of instances; --check only tells whether inst/ is up to date."""

import argparse
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent / "inst"
HALF = {"f16": "__half", "bf16": "__nv_bfloat16"}
HEADS = (32, 64, 96, 128, 256)
ATOMIC_HEADS = (32, 64, 128)  # of backward in one pass
SM86_FORWARD = ((64, "plain"), (64, "general"), (96, "plain"), (96, "general"), (128, "plain"))  # where two blocks fit into 100 KB
SM90_HEADS = (64, 128, 256)
SM90_FORWARD_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of queries and keys, of values


def table():
    """(kernel, dtype, head size, or those of queries and keys and of values, variant, what the template is given)"""
    for dtype, type_name in HALF.items():
        for head in HEADS:
            for variant, general in (("plain", "false"), ("general", "true")):
                yield "attention_fwd_sm80", dtype, head, variant, f"{type_name}, ForwardSm80<{head}, {general}>"
                if (head, variant) in SM86_FORWARD:
                    yield "attention_fwd_sm86", dtype, head, variant, f"{type_name}, ForwardSm80<{head}, {general}, true>"
            yield "attention_weights_sm80", dtype, head, "general", f"{type_name}, ForwardSm80<{head}, true>"
            for variant, general in (("plain", "false"), ("general", "true")):
                backward = f"{type_name}, BackwardSm80<{head}, {general}"
                if head in ATOMIC_HEADS and (variant == "plain" or head <= 64):  # more would not fit into registers
                    yield "attention_bwd_sm80", dtype, head, variant, f"{backward}, true>"
                    yield "attention_bwd_dq_round", dtype, head, variant, f"{backward}, true>"
                yield "attention_bwd_dkv_sm80", dtype, head, variant, f"{backward}, false>"
                yield "attention_bwd_dq_sm80", dtype, head, variant, f"{type_name}, BackwardQueriesSm80<{head}, {general}>"
            for variant, general in (("plain", "false"), ("general", "true")):
                if head in SM90_HEADS:
                    yield "attention_bwd_sm90", dtype, head, variant, f"{type_name}, BackwardSm90<{head}, {general}>"
            yield "attention_bwd_dbias_sm80", dtype, head, "general", f"{type_name}, BackwardQueriesSm80<{head}, true, true>"
        for heads in SM90_FORWARD_HEADS:
            for variant, general in (("plain", "false"), ("general", "true")):
                arguments = f"{type_name}, ForwardSm90<{heads[0]}, {heads[1]}, {general}>"
                yield "attention_fwd_sm90", dtype, heads, variant, arguments


LAUNCH = {
    "attention_fwd_sm90": "AttentionForwardLaunch",
    "attention_bwd_sm90": "AttentionBackwardLaunch",
    "attention_fwd_sm80": "AttentionForwardLaunch",
    "attention_fwd_sm86": "AttentionForwardLaunch",
    "attention_weights_sm80": "AttentionForwardLaunch",
    "attention_bwd_sm80": "AttentionBackwardLaunch",
    "attention_bwd_dkv_sm80": "AttentionBackwardLaunch",
    "attention_bwd_dq_sm80": "AttentionBackwardLaunch",
    "attention_bwd_dbias_sm80": "AttentionBackwardLaunch",
    "attention_bwd_dq_round": "AttentionBackwardLaunch",
}
# Where the file, or the function that launches the kernel, has another name.
SOURCE = {"attention_fwd_sm86": "attention_fwd_sm80", "attention_bwd_dkv_sm80": "attention_bwd_sm80", "attention_bwd_dbias_sm80": "attention_bwd_dq_sm80"}
FUNCTION = {"attention_fwd_sm86": "attention_fwd_sm80", "attention_bwd_dkv_sm80": "attention_bwd_sm80"}


def files():
    declarations, rows = [], {kernel: [] for kernel in LAUNCH}
    for kernel, dtype, heads, variant, arguments in table():
        head, value_head = heads if isinstance(heads, tuple) else (heads, heads)
        name = f"{kernel}_{dtype}_{head if head == value_head else f'{head}_{value_head}'}_{variant}"
        launch = LAUNCH[kernel]
        declarations.append(f"void {name}(const {launch}&, cudaStream_t);")
        general = "true" if variant == "general" else "false"
        rows[kernel].append(f'    {{"{name}", DType::{dtype}, {head}, {value_head}, {general}, {name}}},')
        source = (
            f"// Written by generate_instances.py.\n"
            f'#include "../{SOURCE.get(kernel, kernel)}.cuh"\n\n'
            f"namespace mha::cuda {{\n\n"
            f"void {name}(const {launch}& p, cudaStream_t stream) {{\n"
            f'  launch_{FUNCTION.get(kernel, kernel)}<{arguments}>("{name}", p, stream);\n'
            f"}}\n\n"
            f"}}  // namespace mha::cuda\n"
        )
        yield f"{name}.cu", source
    text = "// Written by generate_instances.py: the kernel instances, in the order in which they are tried.\n#pragma once\n"
    text += '#include "../attention_bwd_launch.h"\n#include "../kernels.h"\n\nnamespace mha::cuda {\n\n' + "\n".join(declarations) + "\n"
    for kernel, lines in rows.items():
        text += f"\ninline constexpr Instance<{LAUNCH[kernel]}> k_{kernel}[] = {{\n" + "\n".join(lines) + "\n};\n"
    yield "instances.h", text + "\n}  // namespace mha::cuda\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when inst/ is not up to date")
    options = parser.parse_args()
    wanted = dict(files())
    found = {path.name: path.read_text() for path in FOLDER.glob("*")}
    if options.check:
        sys.exit(0 if wanted == found else "inst/ is not up to date: run csrc/cuda/generate_instances.py")
    FOLDER.mkdir(exist_ok=True)
    for name in found.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        if found.get(name) != text:
            (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
