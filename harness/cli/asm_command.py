"""``zinc-rt asm``: assembles an AMD kernel's text to a checked ``.zrt`` file, and back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.cli.outputs import check_output
from harness.cli.parser import add_count, add_file, add_switch, path_argument
from harness.settings import group_of

GPUS = "gfx1201", "gfx1100"
EPILOG = """\
examples:
  zinc-rt asm scale.k                      compile a kernel; writes scale.zrt
  zinc-rt asm matmul.k --dtype q4_k        a kernel with one form a storage type
  zinc-rt asm rope.k --integer             division and root by integers
  zinc-rt asm mine.s --items 64 -o a.zrt   assembly, in groups of 64
  zinc-rt asm rope.k --gpu gfx1100         for RDNA3 instead of RDNA4
  zinc-rt asm a.zrt --list                 the instructions of a kernel file

A .k file has the name of its operation (accel/kernels has one of each). A .s
file has one .amdhsa_kernel with a kernarg pointer in s[0:1], waves of 32 and no
scratch memory. A line of --list has the words, the mnemonic, and the registers
that are written <- read.

The checks are those of the package's own kernels: only inputs that a launch
sets, only known instructions, no branch that leaves the kernel, and no load
that is used before it has arrived. No kernel runs. Needs clang-19 and lld-19,
except for a .zrt.
"""


def add_parser(subparsers: Any) -> None:
    """Add the ``asm`` command; its parser sets ``func(args) -> exit code``."""
    text = "compile, check and list a kernel for AMD GPUs"
    parser = subparsers.add_parser("asm", help=text, description=text, epilog=EPILOG)
    parser.add_argument("input", metavar="FILE", type=path_argument, help="a file: .k, .s or .zrt")
    output = group_of(parser, "output")
    add_file(output, "-o", "--output", help="the .zrt file to write")
    group = group_of(parser, "input")
    group.add_argument(
        "--dtype", default="", metavar="TYPE", help="storage type of a .k, such as q4_k"
    )
    add_switch(group, "--integer", help="compute division and root with integers")
    add_count(group, "--items", 128, "items in a work-group of a .s")
    group_of(parser, "device").add_argument(
        "--gpu", choices=GPUS, default=GPUS[0], help=f"the GPU to compile for [default: {GPUS[0]}]"
    )
    add_switch(output, "--list", help="print the instructions, write nothing")
    parser.set_defaults(func=asm)


def asm(args: argparse.Namespace) -> int:
    """Write the kernel file, or print its code."""
    from accel.amd.generation import BY_ARCHITECTURE
    from accel.amd.tools.assemble import AssemblyOptions, kernel_from
    from accel.amd.tools.listing import listing
    from contract.cached_files import writing
    from contract.errors import ConfigError, system_errors_as
    from contract.kernel import encode_kernel

    path: Path = args.input
    target: Path = args.output or path.with_suffix(".zrt")
    if not args.list:
        if path.exists() and target.exists() and target.samefile(path):
            raise ConfigError(f"{path} is a kernel file already; see --list, or name another by -o")
        check_output("--output", target)
    gpu = BY_ARCHITECTURE[args.gpu]
    kernel = kernel_from(path, AssemblyOptions(args.dtype, not args.integer, args.items, gpu))
    lines = listing(kernel)
    if args.list:
        print("\n".join(lines))
        return 0
    with system_errors_as(str(target)), writing(target) as file:
        file.write(encode_kernel(kernel))
    print(f"{target}: {next(lines)}")
    return 0
