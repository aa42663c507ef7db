"""`python -m megatron_gdn COMMAND`: the tools around training.

A command is a module with `add_arguments(parser)` and `main(args) -> int`. All of them are imported for
the help texts, so none may import torch or megatron before `main` runs.
"""

import argparse
import os
import signal
import sys
from importlib import import_module

COMMANDS = {
    "convert": "megatron_gdn.convert",
    "doctor": "megatron_gdn.doctor",
    "prepare-data": "megatron_gdn.prepare_data",
}


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    0: done. 1: `doctor` found a fault. 2: the input or the flags are not right, told in one line. 130, 143:
    stopped by a signal.
    """
    parser = argparse.ArgumentParser(prog="python -m megatron_gdn", description="Tools around training.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, path in COMMANDS.items():
        module = import_module(path)
        summary = module.__doc__.splitlines()[0]
        command = commands.add_parser(name, help=summary, description=summary)
        module.add_arguments(command)
        command.set_defaults(run=module.main)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # --workers counts processes, one thread each
    # Unwinds like Ctrl-C does, so that a command removes its temporary files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main())
