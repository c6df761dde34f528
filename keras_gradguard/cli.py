"""The command ``gradguard``: guard a script, show findings, look at a saved model."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from keras_gradguard import terminal
from keras_gradguard.errors import GradientGuardError
from keras_gradguard.findings import Finding, Report
from keras_gradguard.policy import Policy
from keras_gradguard.unmodified import Guards, run_script
from keras_gradguard.vocabulary import SYMPTOMS

FOUND = 3
_MISUSED = 2
_MILD: dict[str, Any] = dict.fromkeys(SYMPTOMS, "warn")

_RUN = """\
examples:
  gradguard run train.py --epochs 3        guard every fit and every Keras optimizer
  gradguard run --warn-only train.py       let it run to its end, and warn
  gradguard run --report out.json train.py
  gradguard run --log-dir logs train.py    and: tensorboard --logdir logs

Exit code: 3 when a finding raised, otherwise that of the script.
"""
_SHOW = """\
examples:
  gradguard show logs/
  gradguard show --json logs/ > runs.json

Needs no TensorFlow. A line of blocks is a gradient's norm over the run: a dot stands for exact
zeros, an exclamation mark for NaN or Inf, a blank for a gradient that is None.
"""
_DIAGNOSE = """\
examples:
  gradguard diagnose model.keras data.npz
  gradguard diagnose model.keras data.npz --loss binary_crossentropy

The file holds arrays x and y, and sample_weight if there is one:
  numpy.savez("data.npz", x=x, y=y)

Exit code: 3 when training could not work, otherwise 0.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name. Defaults to ``sys.argv[1:]``.

    Returns:
        The exit code: 0, 3 for a finding that raises, 2 for a wrong call, or the script's own.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        code: int = options.act(options)
    except _MisuseError as error:
        print(f"gradguard: {error}", file=sys.stderr)
        return _MISUSED
    except BrokenPipeError:
        # `gradguard show logs | head`: the reader has what it wanted.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


class _MisuseError(Exception):
    """Something the person typed cannot be used; the text says what to do."""


def _say(text: str, stream: TextIO) -> None:
    print(terminal.colored(text) if terminal.wants_color(stream) else text, file=stream)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradguard",
        description="True gradients inside Keras training, an honest alarm, the cause and the fix.",
    )
    version = metadata.version("keras-gradguard")
    parser.add_argument("--version", action="version", version=f"gradguard {version}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    plain = argparse.RawDescriptionHelpFormatter

    run = commands.add_parser(
        "run",
        help="run a script with every training in it guarded",
        description="Run an unmodified script with every fit and every Keras optimizer guarded.",
        epilog=_RUN,
        formatter_class=plain,
    )
    run.add_argument("--warn-only", action="store_true", help="warn about findings, never raise")
    run.add_argument("--log-dir", metavar="DIR", help="write event files for TensorBoard here")
    run.add_argument("--report", metavar="FILE", type=Path, help="write the findings as JSON")
    run.add_argument("--check-every", metavar="N", type=_positive, default=10, help="default: 10")
    run.add_argument("--sample-every", metavar="N", type=_positive, default=50, help="default: 50")
    run.add_argument("script", type=Path, help="the Python file")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    run.set_defaults(act=_run)

    show = commands.add_parser(
        "show",
        help="print the findings and the gradient flow below a log directory",
        description="Print what was found in the runs below a log directory, and each variable's "
        "gradient over the run.",
        epilog=_SHOW,
        formatter_class=plain,
    )
    show.add_argument("log_dir", type=Path, help="what was given to GradientGuard as log_dir")
    show.add_argument("--json", action="store_true", help="print one JSON document")
    show.set_defaults(act=_show)

    look = commands.add_parser(
        "diagnose",
        help="look at a saved model and one batch, without training",
        description="Look at a saved model and one batch, without training.",
        epilog=_DIAGNOSE,
        formatter_class=plain,
    )
    look.add_argument("model", type=Path, help="a .keras file")
    look.add_argument("data", type=Path, help="an .npz file with x, y and maybe sample_weight")
    look.add_argument("--loss", help="name of a Keras loss; default: the compiled one")
    look.add_argument("--report", metavar="FILE", type=Path, help="write the report as JSON")
    look.set_defaults(act=_diagnose)
    return parser


# ------------------------------------------------------------------ run


def _run(options: argparse.Namespace) -> int:
    script: Path = options.script
    if not script.is_file():
        raise _MisuseError(f"there is no file '{script}'")
    policy = dataclasses.replace(Policy(), **(_MILD if options.warn_only else {}))
    guards = Guards(
        policy=policy,
        log_dir=options.log_dir,
        check_every=options.check_every,
        sample_every=options.sample_every,
    )
    raised = False
    try:
        code = _script_code(script, options.arguments, guards)
    except GradientGuardError as error:
        raised, code = True, FOUND
        if all(f is not error.finding for f in guards.findings):
            guards.findings.append(error.finding)
        line = _line_of(script, error)
        _say(f"{error}\n\n  raised  {line}" if line else str(error), sys.stderr)
    finally:
        if options.report is not None:
            _write(options.report, Report(findings=tuple(guards.findings), title=str(script)))
    if not raised and any(policy.action(f) == "raise" for f in guards.findings):
        # The script caught the error itself and went on; the finding stands.
        code = FOUND
    if guards.findings:
        count = len(guards.findings)
        print(f"gradguard: {count} finding{'s' * (count > 1)} in {script}", file=sys.stderr)
    return code


def _script_code(script: Path, arguments: Sequence[str], guards: Guards) -> int:
    """Run the script and return its exit code as the interpreter would."""
    try:
        run_script(script, arguments, guards)
    except GradientGuardError:
        raise
    except SystemExit as stop:
        if stop.code is None:
            return 0
        if isinstance(stop.code, int):
            return stop.code
        print(stop.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("KeyboardInterrupt", file=sys.stderr)
        return 130
    except BaseException as error:
        # The frames up to the script are ours and would only be in the way.
        frames = traceback.extract_tb(error.__traceback__)
        own = next((i for i, f in enumerate(frames) if f.filename == str(script)), 0)
        print("Traceback (most recent call last):", file=sys.stderr)
        print("".join(traceback.format_list(frames[own:])), end="", file=sys.stderr)
        print("".join(traceback.format_exception_only(error)), end="", file=sys.stderr)
        return 1
    return 0


def _line_of(script: Path, error: BaseException) -> str:
    """Return the script's own line that training was called from."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(script)]
    return f"{script}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(report.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise _MisuseError(f"cannot write the report: {error}") from error


# ------------------------------------------------------------------ show


def _show(options: argparse.Namespace) -> int:
    home: Path = options.log_dir
    if not home.is_dir():
        raise _MisuseError(f"there is no directory '{home}'")
    from keras_gradguard.tensorboard import show

    runs = show.overview(home)
    if options.json:
        print(show.as_json(runs))
    else:
        _say(show.as_text(runs), sys.stdout)
    return 0


# ------------------------------------------------------------------ diagnose


def _diagnose(options: argparse.Namespace) -> int:
    for path in (options.model, options.data):
        if not path.exists():
            raise _MisuseError(f"there is no file '{path}'")
    import keras
    import numpy as np

    from keras_gradguard.diagnosis import diagnose

    try:
        with np.load(options.data, allow_pickle=False) as stored:
            data = dict(stored)
    except (OSError, ValueError) as error:
        raise _MisuseError(f"cannot read '{options.data}' as an .npz file: {error}") from error
    if "x" not in data:
        held = ", ".join(sorted(data)) or "nothing"
        raise _MisuseError(f"'{options.data}' must hold an array named x. It holds: {held}")
    try:
        model = keras.models.load_model(options.model)
    except (OSError, ValueError, TypeError) as error:
        raise _MisuseError(f"Keras cannot load '{options.model}': {error}") from error
    report = diagnose(
        model,
        data["x"],
        data.get("y"),
        loss=options.loss,
        sample_weight=data.get("sample_weight"),
    )
    _say(str(report), sys.stdout)
    if options.report is not None:
        _write(options.report, report)
    return FOUND if _raises(report.findings) else 0


def _raises(findings: Sequence[Finding]) -> bool:
    policy = Policy()
    return any(policy.action(f) == "raise" for f in findings)
