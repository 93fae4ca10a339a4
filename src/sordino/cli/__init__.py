"""The command line `sordino`: arguments, printing and exit codes; one file per group of commands.

Exit codes: 0 fine, 1 a certificate or audit fails or a budget is spent, 2 bad input, 3 a worker of a run died.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sordino.cli import configure, operations, planning, results, run  # noqa: F401  (commands)
from sordino.cli.console import app, listened
from sordino.codec.boundary import failure
from sordino.errors import (
    BudgetError,
    CertificateError,
    DivergedError,
    QuorumError,
    RankError,
    Stopped,
    StorageError,
    UserError,
    brief_repr,
)  # fmt: skip
from sordino.runs import launch
from sordino.version import __version__

__all__ = ["app", "main"]
STOPPED = "stopped; what was charged stays charged; continue with --resume"
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # whichever click this typer carries


def main() -> None:
    """Run the command line; a user's mistake is one sentence on standard error and exit code 2."""
    try:
        with launch.stop_signals():
            code = app(standalone_mode=False)
    except Stopped as stopped:
        _stop(STOPPED, int(stopped.code or 0))
    except UserError as error:
        _stop(str(error), 2)
    except (CertificateError, BudgetError, DivergedError) as error:
        _stop(str(error), 1)
    except QuorumError as error:
        _stop(str(error), launch.FAILED)
    except RankError as error:
        _stop("" if error.said else str(error), launch.exit_code(error))
    except OSError as error:  # a path that no system takes, a disk or a folder that refuses
        reason = error.strerror or str(error) or type(error).__name__
        where = brief_repr(str(error.filename)) if error.filename else "a file or a connection"
        fix = "choose another, or mend it"
        _stop(str(StorageError(f"{where}, which failed ({reason})", "a path to read and write", fix)), 2)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a group of commands without one: print its help
            with listened(sys.stdout):
                print(error)
            sys.exit(0)
        _stop(str(error.format_message() if hasattr(error, "format_message") else error), 2)
    except (Exception, SystemExit) as error:  # a part of somebody else's, outside a run
        found = failure(error)
        if found is None:
            raise
        _stop(str(found), 2)
    else:
        if code == 130:  # what typer makes of an interrupt
            _stop(STOPPED, 130)
        sys.exit(code if isinstance(code, int) else 0)


def _stop(sentence: str, code: int) -> None:
    with listened(sys.stderr):
        if sentence:
            print(f"sordino: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Differentially private federated learning, with a certificate that is true of what ran."""
    if version:
        print(f"sordino {__version__}")
        raise typer.Exit
