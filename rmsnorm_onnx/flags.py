"""Flags that several commands of the command line share."""

from __future__ import annotations

import argparse


def add_rewrite(command: argparse.ArgumentParser) -> None:
    """What `fuse` and `expand` take beside the form."""
    command.add_argument(
        "--allow-rounding-change",
        action="store_true",
        help="also rewrite where a rounding to a narrower type moves; each is listed",
    )
    command.add_argument("--opset", type=int, metavar="N", help="move the whole model to this opset, 13 or newer")
    command.add_argument("--verify", action="store_true", help="measure each site; write only if all hold")
    add_site(command)


def add_report(command: argparse.ArgumentParser) -> None:
    """What every command with a report takes."""
    command.add_argument("--explain", metavar="NODE", help="tell everything about the site of this name")
    command.add_argument(
        "--strict", action="store_true", help="exit 1 if a candidate was declined, or a norm to be measured was not run"
    )


def add_site(command: argparse.ArgumentParser) -> None:
    """What every command takes that looks for norms."""
    add_report(command)
    add_pattern(command, "--only", "take sites that match")
    add_pattern(command, "--skip", "leave sites that match")


def add_pattern(command: argparse.ArgumentParser, flag: str, text: str) -> None:
    """A flag that takes patterns of names."""
    text += " this glob on the name or the module; may be repeated"
    command.add_argument(flag, metavar="PATTERN", action="append", default=[], help=text)
