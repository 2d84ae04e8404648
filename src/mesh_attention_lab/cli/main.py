"""The `mesh-attention` command: its subcommands, and errors as one line and an exit code.

Exit codes: 0 done; 1 a plan breaks a rule; 2 the input cannot be used; 130 interrupted.
"""

from __future__ import annotations

import errno
import io
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from mesh_attention import __version__
from mesh_attention.errors import PlanError, UsageError
from mesh_attention_lab.cli.calibrate import calibrate_command
from mesh_attention_lab.cli.demo import demo_command
from mesh_attention_lab.cli.draw import draw_command
from mesh_attention_lab.cli.options import command
from mesh_attention_lab.cli.plan import plan_command, verify_command
from mesh_attention_lab.cli.replay import replay_command
from mesh_attention_lab.cli.simulate import simulate_command
from mesh_attention_lab.cli.tune import tune_command
from mesh_attention_lab.launch import WorkerError

PROGRAM = "mesh-attention"

app = typer.Typer(name=PROGRAM, add_completion=False)
COMMANDS: dict[str, Callable[..., None]] = {
    "plan": plan_command,
    "verify": verify_command,
    "simulate": simulate_command,
    "tune": tune_command,
    "draw": draw_command,
    "demo": demo_command,
    "calibrate": calibrate_command,
    "replay": replay_command,
}
for _name, _command in COMMANDS.items():
    app.command(_name)(command(_command))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Exact attention over long sequences, spread over many ranks: plan it, prove it, forecast it, run it."""


# Newer typer carries click inside it, older typer imports it; either way its errors have this base.
_ClickError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without × must not end the program
    try:
        code = typer.main.get_command(app).main(args=list(arguments), prog_name=PROGRAM, standalone_mode=False)
    except PlanError as error:
        return _complain(str(error), code=1)
    except WorkerError as error:
        print(error, file=sys.stderr)  # whole: it has a traceback
        return 1
    except UsageError as error:
        return _complain(str(error))
    except _ClickError as error:
        is_refusal = isinstance(error.__cause__, UsageError)  # of the library: its message says all, but for the option
        return _complain(_with_name(error) if is_refusal else _with_help(error, arguments[0]))
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EIO):
            raise
        return _complain(f"the output cannot be written: {error.strerror}")
    return code if isinstance(code, int) else 0


def _complain(message: str, *, code: int = 2) -> int:
    # A terminal obeys some characters; a message may have them from a file.
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in " ".join(message.split()))
    print(f"{PROGRAM}: error: {line}", file=sys.stderr)
    return code


def _with_name(error: Any) -> str:
    """The message after the name of the option, which it continues if it begins with a space."""
    name, message = error.param.opts[0], str(error.__cause__)
    return f"{name}{message}" if message.startswith(" ") else f"{name}: {message}"


def _with_help(error: Any, first_argument: str) -> str:
    """The message, and where to read more."""
    context = getattr(error, "ctx", None)
    path = PROGRAM if context is None else context.command_path
    if context is None and first_argument in COMMANDS:
        path += f" {first_argument}"
    message = error.format_message().rstrip(".")
    return f"{message}{'' if message.endswith('?') else '.'} See '{path} --help'"
