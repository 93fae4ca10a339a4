"""Command line `sordino`: arguments, printing and exit codes; one file per group of commands.

Exit codes: 0 success; 1 a certificate or audit fails, or a privacy budget is exhausted; 2 wrong input; 3 a process of a
run ended early, or too few clients replied.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from sordino import errors
from sordino.cli import configure, linting, operations, planning, results, run  # noqa: F401  (commands)
from sordino.cli.console import app, tolerate_closed_pipe
from sordino.codec.boundary import failure
from sordino.runs import launch
from sordino.version import __version__

__all__ = ["app", "main"]
STOPPED = "stopped; charged rounds stay charged; continue with --resume"
UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # whichever click this typer carries


def main() -> None:
    """Run the command line; a user's mistake is one sentence on standard error and exit code 2."""
    try:
        with launch.stop_signals():
            code = app(standalone_mode=False)
    except errors.Stopped as stopped:
        _stop(STOPPED, int(stopped.code or 0))
    except errors.UserError as error:
        _stop(str(error), 2)
    except (errors.CertificateError, errors.BudgetError, errors.DivergedError) as error:
        _stop(str(error), 1)
    except errors.QuorumError as error:
        _stop(str(error), launch.FAILED)
    except errors.RankError as error:
        _stop("" if error.said else str(error), launch.exit_code(error))
    except OSError as error:  # an impossible path, a full disk, a missing permission
        reason = error.strerror or str(error) or type(error).__name__
        where = errors.brief_repr(str(error.filename)) if error.filename else "a file or a connection"
        needed, fix = "a path that can be read and written", "correct the path or its permissions, or free disk space"
        _stop(str(errors.StorageError(f"{where}, which failed ({reason})", needed, fix)), 2)
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # a command group without a command: print its help
            with tolerate_closed_pipe(sys.stdout):
                print(error)
            sys.exit(0)
        _stop(str(error.format_message() if hasattr(error, "format_message") else error), 2)
    except (Exception, SystemExit) as error:  # raised by a user's part outside a run
        found = failure(error)
        if found is None:
            raise
        _stop(str(found), 2)
    else:
        if code == 130:  # what typer makes of an interrupt
            _stop(STOPPED, 130)
        sys.exit(code if isinstance(code, int) else 0)


def _stop(sentence: str, code: int) -> None:
    with tolerate_closed_pipe(sys.stderr):
        if sentence:
            print(f"sordino: {' '.join(sentence.split())}", file=sys.stderr, flush=True)
    sys.exit(code)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Differentially private federated learning, with a certificate that is true of what ran."""
    if version:
        print(f"sordino {__version__}")
        raise typer.Exit
