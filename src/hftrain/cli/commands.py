"""The command `hftrain`: train, look at runs, find faults, and plan."""

from __future__ import annotations

import argparse
import os
import re
import sys
from contextlib import nullcontext, redirect_stdout
from importlib.metadata import version
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, NoReturn

from hftrain.core.errors import HFTrainError, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hftrain.cli.answer import Answer

_SHELLS = ("bash", "zsh", "fish", "tcsh", "powershell")
# The first command of each group in the help.
_HEADINGS = {
    "fit": "train",
    "runs": "look at runs",
    "check": "find faults",
    "checkpoints": "checkpoints",
    "strategies": "plan",
    "completion": "other",
}

# What a script's own words, after --, are called.
_AFTER = {"prove": "arguments", "replay": "script", "capsule": "script"}


class _Formatter(argparse.HelpFormatter):
    """Write a heading above the first command of each group."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=20)

    def _format_action(self, action: argparse.Action) -> str:
        is_command = action.dest in _HEADINGS and not action.option_strings and action.nargs is None
        heading = f"\n  {_HEADINGS[action.dest]}:\n" if is_command else ""
        return heading + super()._format_action(action)


class _Parser(argparse.ArgumentParser):
    """Report an unknown option or command in one line, with the closest name."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if wrong:
            message = f"There is no {wrong[1]!r}. {suggest(wrong[1], re.findall(r'[a-z]+', wrong[2]))}"
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Run one of the commands and print the result.

    An error is printed as one line on stderr, and the exit status is 1; ``--debug`` shows the traceback. Characters
    that the output cannot show become question marks, and a closed pipe ends the command silently.

    Args:
        argv: The arguments after ``hftrain``; None takes those of the process.
    """
    parser = make_parser()
    words = sys.argv[1:] if argv is None else list(argv)
    # argparse would not give what stands after -- to positional arguments that come after options.
    after = _AFTER.get(next((word for word in words if word[:1] != "-"), ""))
    number = words.index("--") if after and "--" in words else len(words)
    given = parser.parse_args(words[:number])
    options = {name: value for name, value in vars(given).items() if name not in ("command", "debug", "show", "json")}
    options |= {after: words[number + 1 :]} if after else {}
    if given.command is None:
        parser.print_help()
        return
    if given.command == "fit" and "--json" in given.arguments:
        given.arguments.remove("--json")
        given.json = True
    try:
        # What a training or a script prints is not the answer.
        with redirect_stdout(sys.stderr) if given.json else nullcontext():
            answer: Answer = resolve_name(f"hftrain.cli.{given.show}")(**options)
    except HFTrainError as error:
        if given.debug:
            raise
        parser.exit(1, f"hftrain {given.command}: {error}\n")
    text = answer.to_json() if given.json else "\n".join(answer)
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The interpreter flushes again at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        parser.exit(1)
    if answer.status:
        parser.exit(answer.status)


def make_parser(*, file: object = None, folder: object = None) -> argparse.ArgumentParser:
    """Return the parser of all commands. Their modules are imported when they run, so that help is fast.

    Args:
        file: shtab's completion of file names; it reads the attribute `complete` of arguments.
        folder: shtab's completion of folders.
    """
    usage = "hftrain [--version] [--debug] COMMAND [OPTIONS]"
    parser = _Parser("hftrain", usage, "Train, look at runs, find faults, and plan.", formatter_class=_Formatter)
    parser.add_argument("--version", action="version", version=f"hftrain {version('hftrain')}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    # The column of the descriptions is as wide as this metavar, not as the longest command.
    add = _Adder(parser.add_subparsers(dest="command", title="commands", metavar="COMMAND [OPTIONS]", prog="hftrain"))
    what = "train as a YAML file says, with overrides as options"
    # The options are those of the file's classes: this parser takes them all as words.
    part = add("fit", "configured:show_fit", what, prefix_chars="\0", add_help=False)
    _complete(part.add_argument("arguments", nargs=argparse.REMAINDER, metavar="FILE ..."), file)
    _add_views(add, folder)
    _add_faults(add, folder)
    _add_proof(add, file)
    _add_comparison(add, folder)
    _add_capsules(add, file, folder)
    what = "list a run's checkpoints and the one that a resume takes"
    part = add.of_run("checkpoints", what, folder, "Each one is checked for missing and truncated files.")
    verify = "also compare the SHA-256 of every file"
    part.add_argument("--verify", dest="should_verify", action="store_true", help=verify)
    _add_plans(add, file)
    what, more = "print a script that completes this command in a shell", 'For bash: eval "$(hftrain completion bash)".'
    part = add("completion", "commands:show_completion", what, f"{more} Needs shtab.")
    part.add_argument("shell", choices=_SHELLS)
    return parser


def show_completion(shell: str) -> Answer:
    """Return a script that completes `hftrain`, its commands, their options and the names of files."""
    resolve_name("hftrain.core.extras").require("shtab", feature="hftrain completion", extra="completion")
    shtab = resolve_name("shtab")
    script = shtab.complete(make_parser(file=shtab.FILE, folder=shtab.DIRECTORY), shell)
    answer: Answer = resolve_name("hftrain.cli.answer").Answer([script], {"shell": shell, "script": script})
    return answer


class _Adder:
    """Add commands; `show` is the function in this package that takes a command's options and returns an `Answer`."""

    def __init__(self, commands: Any) -> None:
        self._commands = commands

    def __call__(
        self, name: str, show: str, summary: str, details: str = "", **options: Any
    ) -> argparse.ArgumentParser:
        description = f"{summary[0].upper()}{summary[1:]}. {details}"
        part: argparse.ArgumentParser = self._commands.add_parser(
            name, help=summary, description=description, formatter_class=_Formatter, **options
        )
        part.set_defaults(show=show, json=False)
        if not options:
            part.add_argument("--json", action="store_true", help="print JSON instead, for programs")
        return part

    def of_run(
        self, name: str, summary: str, folder: object, details: str = "", **many: Any
    ) -> argparse.ArgumentParser:
        """Add a command about one run, or about several if `many` says how many."""
        part = self(name, f"{name}:show_{name}", summary, details)
        named: dict[str, Any] = {"metavar": "run", **many, "help": "the output_dir of a run"}
        _complete(part.add_argument("runs" if many else "run", **named), folder)
        return part


def _complete(argument: argparse.Action, names: object) -> None:
    argument.complete = names  # type: ignore[attr-defined]


def _add_views(add: _Adder, folder: object) -> None:
    part = add("runs", "facts:show_runs", "list the runs in a folder: state, steps, best metric, time")
    _complete(part.add_argument("folder", help="the folder that holds their output folders"), folder)
    what = "draw what runs have logged, in the terminal or as an image file"
    part = add.of_run("curves", what, folder, nargs="+")
    metric = "a logged number such as eval_loss, may be repeated; by default the losses"
    part.add_argument("--metric", dest="metrics", action="append", default=[], metavar="NAME", help=metric)
    part.add_argument("-o", "--output", metavar="FILE", help="write a .png, .svg or .pdf file instead")
    part = add.of_run("report", "write an HTML page that shows a run, or compares several", folder, nargs="+")
    part.add_argument("-o", "--output", metavar="FILE", default="report.html", help="default: report.html")


def _add_proof(add: _Adder, file: object) -> None:
    what = "prove that a script trains the same on several processes as on one, divided otherwise, and resumed"
    part = add("prove", "prove:show_prove", what, "The exit status is 1 if it does not.")
    _complete(part.add_argument("script", help="a Python file that trains"), file)
    names = "with options behind commas, as in fsdp_tp,tp_size=2; own: the script's own; default: ddp"
    part.add_argument("--strategy", metavar="NAME", default="ddp", help=names)
    what = "another strategy to compare with, on as many processes; default: single, which is one process"
    part.add_argument("--against", metavar="NAME", default="single", help=what)
    part.add_argument("--processes", type=int, metavar="N", default=2, help="default: 2")
    part.add_argument("--full", dest="is_full", action="store_true", help="keep the size of the model")
    part.add_argument("-o", "--output", metavar="FILE", help="write a Markdown file, and the same as JSON next to it")
    part.epilog = "The script's own arguments come after --."


def _add_comparison(add: _Adder, folder: object) -> None:
    what = "say which of two ways to train is better, from runs in pairs of the same seed"
    more = "The exit status is 0 if B is known not to be worse, 1 if it is worse, and 3 if neither is known."
    part = add("compare", "compare:show_compare", what, more)
    names = "the output_dir of a run, or a pattern of several in quotes ('runs/a-*'); with --run, a command in quotes"
    _complete(part.add_argument("runs", nargs=2, metavar=("A", "B"), help=names), folder)
    what = "train both commands, such as 'train.py --lr 1e-3', with the same seeds"
    part.add_argument("--run", dest="should_run", action="store_true", help=what)
    what = "auto: until the difference is known, 12 at most; or how many; or which, as in 1,2,3; default: auto"
    part.add_argument("--seeds", metavar="SEEDS", help=what)
    what = "the number that is compared, as it was logged last; default: the evaluation loss"
    part.add_argument("--metric", metavar="NAME", help=what)
    part.add_argument("--better", choices=("lower", "higher"), help="default: as the name of the metric says")
    what = "a difference that matters, in units of the metric; default: 0"
    part.add_argument("--min-difference", type=float, metavar="X", default=0.0, help=what)
    what = "the folder of the runs that --run trains; those that are there are used; default: compare"
    part.add_argument("-o", "--output", metavar="FOLDER", help=what)


def _add_capsules(add: _Adder, file: object, folder: object) -> None:
    what = "write a step of a run into one file, with which it can be done again anywhere"
    part = add.of_run("capsule", what, folder, "It is first done again here, as by hftrain replay.")
    part.add_argument("--step", type=int, metavar="N", required=True, help="the step, from 1")
    part.add_argument("-o", "--output", metavar="FILE", help="default: step<N>.capsule")
    part.add_argument("--make", metavar="FILE.py:NAME", help="the function that returns the Trainer for its arguments")
    part.add_argument("--source", dest="has_source", action="store_true", help="put the source of that file in, too")
    part.add_argument("--no-optimizer", dest="has_optimizer", action="store_false", help="leave its state out")
    part.epilog = "Another script, with its arguments, comes after --."
    part = add("open", "capsule:show_open", "do the step in a capsule again, and compare its numbers")
    _complete(part.add_argument("path", metavar="capsule", help="the file that hftrain capsule wrote"), file)
    _complete(part.add_argument("--code", metavar="FOLDER", help="the folder of FILE.py, which is run"), folder)
    part.add_argument("--run-source", dest="runs_source", action="store_true", help="run the source that it holds")
    part.add_argument("--at", metavar="MODULE", default="", help="open a debugger in the first call of this module")


def _add_faults(add: _Adder, folder: object) -> None:
    what = "prove in two minutes what this machine does right: numbers, resumes, processes, waits"
    part = add("check", "check:show_check", what, "Also under torchrun or srun. The exit status is 1 if a proof fails.")
    what = "a folder to prove locks and renames in, such as that of a run; shared, if there are several machines"
    _complete(part.add_argument("--output-dir", metavar="FOLDER", help=what), folder)
    part.add_argument("-o", "--output", metavar="FILE", help="write the answer as JSON, to be attached to a report")
    what = "show the samples behind the steps of a run that stand out, from its flight log"
    part = add.of_run("blame", what, folder, "The run was trained with Trainer(flight_log=True).")
    part.add_argument("--step", type=int, metavar="N", help="look at this step instead of those that stand out")
    part.add_argument("--top", type=int, metavar="N", default=5, help="how many samples to show; default: 5")
    what = "do the first three of them again for the loss and gradient norm of each sample"
    part.add_argument("--replay", action="store_true", help=what)
    what = "write their indices into a JSON file, for Trainer(exclude_samples=...)"
    part.add_argument("-o", "--output", metavar="FILE", help=what)
    what = "do a step of a run again to the bit, with every module looked at"
    part = add.of_run("replay", what, folder, "It starts from the checkpoint before, by the run's own command.")
    part.add_argument("--step", type=int, metavar="N", required=True, help="the step, from 1")
    what = "change an argument, such as args.bf16=false; may be repeated"
    part.add_argument("--with", dest="changes", action="append", default=[], metavar="args.NAME=VALUE", help=what)
    part.add_argument("-o", "--output", metavar="FOLDER", help="a new folder; default: replay-step<N>")
    part.epilog = "Another script, with its arguments, comes after --."
    what = "find the first step, and the first module in it, in which two runs differ"
    part = add.of_run("bisect", what, folder, nargs=2)
    part.add_argument("-o", "--output", metavar="FOLDER", help="a new folder; default: bisect")
    part.add_argument("--steps", type=int, metavar="N", help="compare the first N steps; default: all")
    what = "show where the processes of a run stand, which stand apart, and which one the others wait for"
    add.of_run("hangs", what, folder, "They write it on SIGQUIT, in a run with a flight log.")


def _add_plans(add: _Adder, file: object) -> None:
    for name in ("strategies", "precisions"):
        part = add(name, f"listing:show_{name}", f"list the {name} that can run here, and why others cannot")
        part.add_argument("--cpu", dest="use_cpu", action="store_true", help="assume use_cpu=True")
    what = "print how much memory a training step of a script takes on one device"
    estimate = add("estimate", "plan:show_estimate", what, "The script runs up to its first train(), without weights.")
    what = "print which strategy, mesh and micro-batch fit a script's model on GPUs that are not here"
    part = add("plan", "plan:show_plan", what, "The script runs up to its first train(), without weights.")
    part.add_argument("--gpus", type=int, metavar="N", required=True, help="how many GPUs there are in all")
    part.add_argument("--memory", metavar="SIZE", default="80GB", help="the memory of each; default: 80GB")
    part.add_argument("--gpus-per-machine", type=int, metavar="N", help="how many a machine has; default: 8 at most")
    part.add_argument("--as-set", action="store_true", help="keep its micro-batch and checkpointing; do not offload")
    for each in (estimate, part):
        _complete(each.add_argument("script", help="a Python file that trains"), file)
        each.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
