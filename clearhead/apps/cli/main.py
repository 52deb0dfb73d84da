"""The program `clearhead`: all commands, and the conversion of errors to messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import inspect
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, get_args

import typer

from clearhead.apps.cli.average import average
from clearhead.apps.cli.bench import bench
from clearhead.apps.cli.check import check
from clearhead.apps.cli.compare import compare
from clearhead.apps.cli.console import (
    adapt_streams,
    print_message,
    print_result,
    report_long_texts_once,
    show_library_messages,
    silence,
)
from clearhead.apps.cli.convert import convert
from clearhead.apps.cli.demo import demo
from clearhead.apps.cli.diff import diff
from clearhead.apps.cli.doctor import doctor
from clearhead.apps.cli.evaluate import add_task_options, evaluate
from clearhead.apps.cli.explain import explain
from clearhead.apps.cli.generate import generate
from clearhead.apps.cli.heads import heads
from clearhead.apps.cli.inspect import inspect as inspect_
from clearhead.apps.cli.learn import learn
from clearhead.apps.cli.new import new, new_group
from clearhead.apps.cli.progress import show_idle_time
from clearhead.apps.cli.serve import serve
from clearhead.apps.cli.stopping import StopOnSignal, Stopped
from clearhead.apps.cli.texts import answer, classify, embed, fill, predict, tag
from clearhead.apps.cli.train import share_faults, train
from clearhead.apps.cli.translate import translate
from clearhead.apps.cli.view import view
from clearhead.base.commands import EXTENSIONS, make_command
from clearhead.base.errors import InputError, MessageReference, RunFailure, is_out_of_memory, nearest_name, renaming
from clearhead.base.mapped_files import ending_at_bus_errors
from clearhead.base.signals import Interrupted
from clearhead.fast.busy_waiting import adapt_waiting
from clearhead.spec.tasks.registry import list_tasks, task_kinds
from clearhead.version import __version__

DONE, FAILED, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130

# typer's usage errors have a private class; it is the base of a public one in every release.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]
_COMPLETING: Final = "_CLEARHEAD_COMPLETE"
_OUT_OF_MEMORY: Final = (
    "out of memory: use a precision of fewer bits (bf16, int8 or int4), smaller batches or shorter texts, or free some "
    "memory; {inspect} shows the memory of a model in each precision"
)
# Run-file keys and arguments whose option has another name.
_OPTION_NAMES = {
    "task.labels": "label_kind",
    "task.init": "init",
    "field": "text_column",
    "layer": "layers",
    "head": "heads",
}


def _version(wanted: bool) -> bool:
    if wanted:
        print_result(f"clearhead {__version__}")
        raise typer.Exit(DONE)
    return wanted


def _start(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of a failure; works after any command.")
    ] = False,
    parts: Annotated[
        list[Path] | None,
        typer.Option("--parts", metavar="FILE", help="Import custom modules from this file; works after any command."),
    ] = None,
) -> None:
    """Train a Transformer on your own text, use it, and look inside it.

    \b
    Example:
      clearhead demo
      clearhead new translate --source train.de --target train.en -o run.toml
      clearhead train run.toml
      echo "ein Hund läuft" | clearhead translate runs/de-en

    REF in the commands below is a run directory, a Hugging Face checkpoint, or its name on the hub. A run directory may
    be followed by @best (the default), @last, @averaged or @step-N, a name on the hub by @revision.
    The tasks are {tasks}. Use predict for a task without a separate command.
    Exit codes: 0 success, 1 failure while running, 2 wrong input, 130 after Ctrl-C, 143 after SIGTERM.
    """


class _OrderedGroup(typer.core.TyperGroup):
    """A command group that lists demo and new first; typer would list groups after all commands."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of the commands in the order of the help."""
        first = ["demo", "new"]
        return first + [name for name in super().list_commands(ctx) if name not in first]


def make_app() -> typer.Typer:
    """Return the program with all its commands."""
    app = typer.Typer(
        name="clearhead",
        cls=_OrderedGroup,
        add_completion=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"], "max_content_width": 120},
    )
    app.callback(help=_help(_start))(_start)
    app.add_typer(new_group(), name="new", short_help=_summary(new))
    uses = (translate, generate, fill, classify, tag, embed, answer, predict)
    measure = add_task_options(evaluate)
    for command in (
        demo,
        train,
        *uses,
        view,
        explain,
        measure,
        compare,
        diff,
        average,
        convert,
        check,
        bench,
        inspect_,
        heads,
        serve,
        learn,
        doctor,
    ):
        # Pass the full help: typer would cut the docstring off at the width of the terminal.
        app.command(help=_help(command), short_help=_summary(command))(command)
    return app


def _help(command: Callable[..., None]) -> str:
    """Return the docstring of a command, with all tasks (including those of other packages) and their metrics."""
    text = inspect.cleandoc(command.__doc__ or "")
    *tasks, last = task_kinds()
    text = text.replace("{tasks}", f"{', '.join(tasks)} and {last}")
    width = max(map(len, task_kinds()))
    measures = (f"  {task.kind:<{width}}  {task.evaluate.measures}" for task in list_tasks())
    return text.replace("{measures}", "\n".join(measures))


def _summary(command: Callable[..., None]) -> str:
    return inspect.cleandoc(command.__doc__ or "").partition("\n\n")[0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        arguments: the arguments after the program name. None means the arguments of this process.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    words, parts = _split_parts([word for word in words if word != "--debug"])
    # During completion, the shell passes the words in the environment.
    if not words and _COMPLETING not in os.environ:
        main(["--help"])
        return WRONG_INPUT
    adapt_waiting()
    adapt_streams()
    try:
        with (
            StopOnSignal() as signals,
            ending_at_bus_errors(),
            show_idle_time(),
            show_library_messages(),
            report_long_texts_once(),
        ):
            return copy_context().run(_run, words, parts, debug, signals)
    except Stopped as stopped:
        print_message(f"{stopped}")
        return stopped.exit_code


def _split_parts(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words of a command line without --parts, and the files that --parts names."""
    rest, files, waiting = list[str](), list[str](), list(words)
    while waiting:
        word = waiting.pop(0)
        if word == "--parts" and waiting:
            files.append(waiting.pop(0))
        elif word.startswith("--parts="):
            files.append(word.partition("=")[2])
        else:
            rest.append(word)
    return rest, files


def _run(words: Sequence[str], parts: Sequence[str], debug: bool, signals: StopOnSignal) -> int:
    """Run a command and return its exit code; print one message for an error."""
    EXTENSIONS.set([])
    try:
        if parts:
            from clearhead.core.extensions.files import load_parts

            with share_faults() if words[:1] == ["train"] else contextlib.nullcontext():
                load_parts(parts)
        program = typer.main.get_command(make_app())
        with renaming(partial(_as_option, program, words)):
            _refuse_empty_paths(program, words)
            code = program.main(words, prog_name="clearhead", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        print_message(_usage_message(error, words))
        code = WRONG_INPUT
    except InputError as error:
        code = _report_failure(f"{error}", WRONG_INPUT, debug)
    except RunFailure as error:
        code = _report_failure(f"{error}", FAILED, debug)
    except Interrupted as error:
        print_message(f"{error}")
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else FAILED
    except Exception as error:  # noqa: BLE001 - the last resort: every error becomes one message
        if signals.received is not None:
            # A library that is interrupted during its import may raise a different error.
            raise Stopped(signals.received) from None
        if is_out_of_memory(error):
            code = _report_failure(_OUT_OF_MEMORY.format(inspect=make_command("inspect REF")), FAILED, debug)
        else:
            code = _report_unwritable(error, debug) if isinstance(error, OSError) else _report_unexpected(error, debug)
    if code == INTERRUPTED:
        print_message("clearhead: interrupted")
    return code if isinstance(code, int) else DONE


def _options(command: Any, words: Sequence[str] = ()) -> dict[Any, Any]:
    """Return the options of a command, or of the subcommand in `words`, each with its type annotation."""
    for word in words:
        command = getattr(command, "commands", {}).get(word, command)
    parameters = inspect.signature(command.callback, eval_str=True).parameters
    options = [option for option in command.params if option.param_type_name == "option" and option.name in parameters]
    return {option: parameters[option.name].annotation for option in options}


def _refuse_empty_paths(program: Any, words: Sequence[str]) -> None:
    """Refuse empty paths, such as from an unset shell variable; they would mean the current folder."""
    # Annotated[Path, ...] or Annotated[Path | None, ...]; the types that typer derives are private.
    kinds = {option: get_args(annotation)[0] for option, annotation in _options(program, words).items()}
    paths = {name for option, kind in kinds.items() if Path in (kind, *get_args(kind)) for name in option.opts}
    for word, value in itertools.pairwise(words):
        if word in paths and not value:
            raise InputError(f"{word} is empty: give the path of a file or folder")


def _as_option(program: Any, words: Sequence[str], reference: MessageReference) -> str | MessageReference:
    """Replace a Python argument, such as top_k, or a run-file key in a message by the option of the command."""
    names = {option.name: option.opts[0] for option in _options(program, words)}
    option = names.get(reference.name) or names.get(_OPTION_NAMES.get(reference.name, ""))
    return reference if option is None or reference.kind not in ("argument", "key") else reference.as_option(option)


def _report_failure(sentence: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print_message(f"clearhead: {sentence}")
    return code


def _report_unexpected(error: Exception, debug: bool) -> int:
    hint = "" if debug else "; run again with --debug to see where"
    return _report_failure(f"unexpected failure: {type(error).__name__}: {error}{hint}", FAILED, debug)


def _report_unwritable(error: OSError, debug: bool) -> int:
    """Report that a file or standard output cannot be written."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return _report_unexpected(error, debug)
    if error.filename is None:
        # The rest of the buffer would fail again when the program ends.
        with contextlib.suppress(OSError, ValueError):
            silence(sys.stdout)
    return _report_failure(f"{error.filename or 'the output'} cannot be written: {error.strerror}", FAILED, debug)


def _usage_message(error: Any, words: Sequence[str]) -> str:
    """Return the message for a wrong command line, with the nearest valid option."""
    name, parameters = "clearhead", []
    if error.ctx is not None:
        name, parameters = error.ctx.command_path, error.ctx.command.params
    message, needed = _wrong_words(error, parameters), _missing_options(parameters, words)
    if getattr(error, "param", None) is not None and error.message:
        message, needed = _bad_value(error, words), []
    if any(option not in message for option in needed):
        message += f"; it needs {' and '.join(needed)}"
    if not message[1:2].isupper():  # arguments keep their capitals, as in the help
        message = message[:1].lower() + message[1:]
    help_words = f"{name.partition(' ')[2]} --help".lstrip()
    return f"{name}: {message}; see {make_command(help_words)}"


def _missing_options(parameters: Sequence[Any], words: Sequence[str]) -> list[str]:
    given_names = {word.partition("=")[0] for word in words}
    options = [parameter for parameter in parameters if parameter.required and parameter.param_type_name == "option"]
    return [option.opts[0] for option in options if given_names.isdisjoint(option.opts)]


def _wrong_words(error: Any, parameters: Sequence[Any]) -> str:
    """Return the error text for unknown options or commands, with the nearest valid name."""
    wanted = getattr(error, "option_name", None)
    if wanted and hasattr(error, "possibilities"):
        from clearhead.generate.options import REMOVED  # import late: most commands need no generation options

        reason = REMOVED.get(wanted.lstrip("-").replace("-", "_"))
        if reason is not None:
            return f"no such option: {wanted}: {reason}; leave it out"
        # Compare without the dashes, which all options share.
        known = {name.lstrip("-"): name for parameter in parameters for name in parameter.opts if name[:1] == "-"}
        near = nearest_name(wanted.lstrip("-"), known)
        return f"no such option: {wanted}" + ("" if near is None else f" (did you mean '{known[near]}'?)")
    message: str = error.format_message().replace("\n", " ").replace(". Did you mean", " (did you mean").rstrip(".")
    return message.removesuffix("?") + "?)" if "(did you mean" in message else message


def _bad_value(error: Any, words: Sequence[str]) -> str:
    """Return the error text for a wrong value, with the expected and the given value."""
    option = error.param.opts[0] if error.param.param_type_name == "option" else error.param.name.upper()
    values = [following for word, following in itertools.pairwise(words) if word in error.param.opts]
    values += [word.partition("=")[2] for word in words if word.partition("=")[0] in error.param.opts and "=" in word]
    # Annotated[int, ...] or Annotated[int | None, ...]: the last item declares the option with its limits.
    kind, *_, declared = get_args(_options(error.ctx.command).get(error.param)) or (None, None)
    number = next((number for number in (int, float) if number in (kind, *get_args(kind))), None)
    if number is None or not values:
        return f"{option} is not valid: {error.message.rstrip('.')}"
    expected = "a whole number" if number is int else "a number"
    with contextlib.suppress(ValueError):
        value = number(values[-1])
        if declared.max is not None and not value <= declared.max:
            expected = f"a number of at most {declared.max:,}"
        elif declared.min is not None and not value >= declared.min:
            expected = f"a number of at least {declared.min}"
    return f"{option} expects {expected}, got {values[-1]!r}"


if __name__ == "__main__":
    sys.exit(main())
