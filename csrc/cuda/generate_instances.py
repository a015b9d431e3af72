#!/usr/bin/env python3
"""Writes one small source file per kernel instance, so that they compile in parallel, and instances.h with their declarations and
tables, into the folder that is given: setup.py builds from there. table() below is the one list of instances."""

import argparse
import pathlib

HALF = {"f16": "__half", "bf16": "__nv_bfloat16"}
HEADS = (32, 64, 96, 128, 256)
ATOMIC_HEADS = (32, 64, 128)  # of backward in one pass
SM86_FORWARD = (64, 96, 128)  # where two blocks fit into 100 KB
SM90_HEADS = (64, 128, 256)
SM90_FORWARD_HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of queries and keys, of values


def table():
    """(kernel, dtype, head size, or those of queries and keys and of values, variant, what the template is given)"""
    for dtype, type_name in HALF.items():
        for head in HEADS:
            for variant, general in (("plain", "false"), ("general", "true")):
                yield "attention_fwd_sm80", dtype, head, variant, f"{type_name}, ForwardSm80<{head}, {general}>"
                if head in SM86_FORWARD:
                    yield "attention_fwd_sm86", dtype, head, variant, f"{type_name}, ForwardSm80<{head}, {general}, true>"
            yield "attention_weights_sm80", dtype, head, "general", f"{type_name}, ForwardSm80<{head}, true>"
            for variant, general in (("plain", "false"), ("general", "true")):
                backward = f"{type_name}, BackwardSm80<{head}, {general}"
                if head in ATOMIC_HEADS and (variant == "plain" or head <= 64):  # more would not fit into registers
                    yield "attention_bwd_sm80", dtype, head, variant, f"{backward}, true>"
                    yield "attention_bwd_dq_round", dtype, head, variant, f"{backward}, true>"
                if (head, variant) == (64, "plain"):  # of twice as many warps; the only one of which no two blocks fit into 100 KB
                    yield "attention_bwd_sm86", dtype, head, variant, f"{backward}, true, 64, 8>"
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
    "attention_bwd_sm86": "AttentionBackwardLaunch",
    "attention_bwd_dkv_sm80": "AttentionBackwardLaunch",
    "attention_bwd_dq_sm80": "AttentionBackwardLaunch",
    "attention_bwd_dbias_sm80": "AttentionBackwardLaunch",
    "attention_bwd_dq_round": "AttentionBackwardLaunch",
}
# Where the file, or the function that launches the kernel, has another name.
FUNCTION = {"attention_fwd_sm86": "attention_fwd_sm80"}
FUNCTION |= dict.fromkeys(("attention_bwd_sm86", "attention_bwd_dkv_sm80"), "attention_bwd_sm80")
SOURCE = FUNCTION | {"attention_bwd_dbias_sm80": "attention_bwd_dq_sm80"}


def source_of(kernel):
    """The file that defines it; its room is the generation that the kernel's name ends with."""
    name = SOURCE.get(kernel, kernel)
    name, room = (name[:-5], name[-4:]) if name[-5:] in ("_sm80", "_sm90") else (name, "sm80")
    return f"{room}/{name}.cuh"


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
            f'#include "{source_of(kernel)}"\n\n'
            f"namespace mha::cuda {{\n\n"
            f"void {name}(const {launch}& p, cudaStream_t stream) {{\n"
            f'  launch_{FUNCTION.get(kernel, kernel)}<{arguments}>("{name}", p, stream);\n'
            f"}}\n\n"
            f"}}  // namespace mha::cuda\n"
        )
        yield f"{name}.cu", source
    text = "// Written by generate_instances.py: the kernel instances, in the order in which they are tried.\n#pragma once\n"
    text += '#include "common/attention_bwd_launch.h"\n#include "kernels.h"\n\nnamespace mha::cuda {\n\n' + "\n".join(declarations) + "\n"
    for kernel, lines in rows.items():
        text += f"\ninline constexpr Instance<{LAUNCH[kernel]}> k_{kernel}[] = {{\n" + "\n".join(lines) + "\n};\n"
    yield "instances.h", text + "\n}  // namespace mha::cuda\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    wanted = dict(files())
    found = {path.name: path.read_text() for path in folder.glob("*")}
    for name in found.keys() - wanted.keys():
        (folder / name).unlink()
    for name, text in wanted.items():
        if found.get(name) != text:  # what has not changed is not compiled again
            (folder / name).write_text(text)


if __name__ == "__main__":
    main()
