"""The command line: train, generate, describe, report, bench.

Heavy modules are imported by the commands that need them, so that `--help` and a
mistyped option answer at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from jaxaccel.cache.plan import CachePlanConfig
    from jaxaccel.config.gin_utils import LoadedExperiment
    from jaxaccel.config.registry import SampleConfig
    from jaxaccel.models.config import DecoderConfig


# Mistakes of the caller: told in one line, without a traceback.
_USER_ERRORS = (ValueError, NotImplementedError, OSError)

_ASSIGNMENT = "--gin."
_CONFIG_FILE = "config.gin"
_SOURCES_FILE = "config_sources.txt"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
      argv: arguments; those of the process by default.

    Returns:
      The exit status: 0 done, 1 a loss that is not finite, 2 a mistake of the caller,
      130 interrupted by the keyboard, 143 ended by SIGTERM with a checkpoint.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = _parser()
    if argv[:1] == ["bench"]:
        # The benchmarks have their own options, and their own --help.
        arguments = argparse.Namespace(command=_bench, debug=False, arguments=argv[1:])
    else:
        arguments = parser.parse_args(list(map(_rewrite_assignment, argv)))
    with _messages_on_stderr():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    """Runs the command; turns what users cause or can mend into one line."""
    try:
        return arguments.command(arguments)
    except BrokenPipeError:
        # The reader of our output went away (`jaxaccel describe | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("jaxaccel: interrupted", file=sys.stderr)
        return 130
    except FloatingPointError as error:
        if arguments.debug:
            raise
        print(f"jaxaccel: stopped: {error}", file=sys.stderr)
        return 1
    except _USER_ERRORS as error:
        if arguments.debug:
            raise
        print(f"jaxaccel: error: {_one_line(error)}", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    return str(error) or type(error).__name__


def _rewrite_assignment(argument: str) -> str:
    """`--gin.NAME=VALUE` is no option that argparse could list."""
    if not argument.startswith(_ASSIGNMENT):
        return argument
    if "=" not in argument:
        raise SystemExit(f"jaxaccel: error: {argument} needs a value: {argument}=VALUE")
    return f"--gin_assignment={argument.removeprefix(_ASSIGNMENT)}"


@contextlib.contextmanager
def _messages_on_stderr() -> Iterator[None]:
    """Our own messages on stderr; other libraries' from warnings upwards.

    Restored at the end: who calls `main` from Python keeps the logging he set up, and
    no handler outlives the stream that it writes to.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    loggers = [logging.getLogger(name) for name in ("jaxaccel", "pallas_kernels")]
    before = [(log.level, list(log.handlers), log.propagate) for log in loggers]
    for log in loggers:
        log.setLevel(logging.INFO)
        log.handlers[:] = [handler]
        log.propagate = False
    try:
        yield
    finally:
        for log, (level, handlers, propagate) in zip(loggers, before, strict=True):
            log.setLevel(level)
            log.handlers[:] = handlers
            log.propagate = propagate


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxaccel",
        description="Efficiency techniques of recent LLM work in JAX.",
        # "--gin.x" must not pass for a short form of "--gin_file".
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], text: str):
        sub = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.add_argument(
            "--debug", action="store_true", help="show tracebacks of errors"
        )
        sub.set_defaults(command=command)
        return sub

    train = add("train", _train, "Train the model that gin files describe.")
    _add_gin_options(train)
    train.add_argument("--workdir", required=True, help="folder of the run")
    train.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --workdir; without --gin_file, as it is configured",
    )
    train.add_argument(
        "--profile_steps",
        type=_step_range,
        metavar="FIRST:END",
        help="write a profiler trace of these steps, such as 10:15",
    )
    train.add_argument(
        "--tensorboard", action="store_true", help="also write TensorBoard files"
    )

    generate = add("generate", _generate, "Continue prompts with a trained model.")
    generate.add_argument(
        "--checkpoint", required=True, help="folder of a run, such as runs/tiny"
    )
    generate.add_argument(
        "--prompt",
        action="append",
        help="text to continue, best without a blank at the end, because words begin "
        "with theirs; may be given repeatedly",
    )
    generate.add_argument("--max_new_tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, default=0.8)
    generate.add_argument("--top_k", type=int)
    generate.add_argument("--top_p", type=float)
    generate.add_argument("--min_p", type=float)
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument(
        "--stream", action="store_true", help="print while tokens are drawn"
    )
    _add_gin_options(generate)
    generate.description = (
        "Continue prompts with a trained model. What its attention layers keep may be "
        "set by gin: a file's SampleConfig.cache, such as that of "
        "experiments/kv_cache/shadowkv.gin, or without a file bindings of "
        "CachePlanConfig."
    )

    describe = add("describe", _describe, "Say what a model consists of and costs.")
    _add_gin_options(describe)
    describe.add_argument("--checkpoint", help="folder of a run, or of safetensors")

    describe.add_argument(
        "--seq_len",
        type=int,
        help="length of the documents that costs are told for; by default that of the "
        "gin file's rows, or 4096",
    )

    report = add("report", _report, "Write one HTML page about one or several runs.")
    report.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    report.add_argument("--out", default="report.html", help="file to write")

    commands.add_parser("bench", help="Measure a training step, or an ablation.")
    return parser


def _add_gin_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("configuration")
    group.add_argument(
        "--gin_file",
        action="append",
        default=[],
        metavar="FILE",
        help="gin file; may be given repeatedly, later ones override",
    )
    group.add_argument(
        "--gin_bindings",
        "--gin_param",
        action="append",
        default=[],
        metavar="BINDING",
        help="gin statement such as 'TrainConfig.num_steps = 10'; repeatable",
    )
    group.add_argument(
        "--gin_assignment", action="append", default=[], help=argparse.SUPPRESS
    )
    group.add_argument(
        "--gin_search_paths",
        action="append",
        default=[],
        metavar="FOLDER",
        help="where gin files and includes are also looked for; repeatable",
    )
    parser.epilog = "--gin.NAME=VALUE sets one binding; a string needs no quotes."


def _given_gin_options(arguments: argparse.Namespace) -> list[str]:
    """The options of `_add_gin_options` that are given, as they were spelt."""
    return [
        *(f"--gin_file={path}" for path in arguments.gin_file),
        *(f"--gin_bindings={binding}" for binding in arguments.gin_bindings),
        *(f"{_ASSIGNMENT}{binding}" for binding in arguments.gin_assignment),
        *(f"--gin_search_paths={path}" for path in arguments.gin_search_paths),
    ]


def _step_range(text: str) -> tuple[int, int]:
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and int(first) < int(end)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no range of steps; expected FIRST:END such as 10:15"
        )
    return int(first), int(end)


def _read_experiment(arguments: argparse.Namespace) -> LoadedExperiment:
    from jaxaccel.config.gin_utils import read_experiment

    return read_experiment(
        arguments.gin_file,
        arguments.gin_bindings,
        assignments=arguments.gin_assignment,
        search_paths=arguments.gin_search_paths,
    )


def _train(arguments: argparse.Namespace) -> int:
    from jaxaccel.core.distributed import initialize

    # Before anything that touches a device.
    initialize()
    import jax

    from jaxaccel.config.writer import experiment_text
    from jaxaccel.training.loop import train
    from jaxaccel.training.metrics import METRICS_FILE

    workdir = pathlib.Path(arguments.workdir)
    if workdir.exists() and not workdir.is_dir():
        raise NotADirectoryError(f"--workdir {workdir} is a file")
    written = workdir / _CONFIG_FILE
    if not arguments.gin_file and arguments.resume:
        if not written.is_file():
            raise FileNotFoundError(f"{workdir} holds no run to resume: no {written}")
        arguments.gin_file = [str(written)]
    if not arguments.gin_file:
        raise ValueError("nothing says what to train; give --gin_file=FILE")
    loaded = _read_experiment(arguments)
    experiment = loaded.experiment
    config = experiment.train
    if arguments.tensorboard:
        config = dataclasses.replace(config, tensorboard=True)
    text = experiment_text(
        dataclasses.replace(experiment, train=config), header=_header(arguments)
    )

    def write_config() -> None:
        if jax.process_index() == 0:
            workdir.mkdir(parents=True, exist_ok=True)
            written.write_text(text, encoding="utf-8")
            sources = workdir / _SOURCES_FILE
            sources.write_text(loaded.provenance(), encoding="utf-8")

    # A folder that `train` may refuse keeps the config of the run that it holds.
    holds_run = any((workdir / name).exists() for name in (METRICS_FILE, "checkpoints"))
    if not holds_run:
        write_config()
    sample = experiment.sample
    result = train(
        config,
        experiment.model,
        experiment.data,
        workdir,
        resume=arguments.resume,
        profile_steps=arguments.profile_steps,
        sampler=None if sample is None else _sampler(sample),
        config_text=text,
    )
    if holds_run:
        write_config()
    # What a shell reports for a process that SIGTERM ended.
    return 143 if result.interrupted else 0


def _header(arguments: argparse.Namespace) -> str:
    files = ", ".join(arguments.gin_file)
    return (
        f"Everything that this run is made from, defaults included; from {files}.\n"
        f"{_SOURCES_FILE} says which line set what. To run it again:\n"
        f"    jaxaccel train --gin_file={_CONFIG_FILE} --workdir=FOLDER"
    )


def _sampler(sample: SampleConfig):
    def draw(model, tokenizer) -> list[str]:
        from jaxaccel.decoding.generate import generate_text

        texts = generate_text(
            model,
            tokenizer,
            sample.prompts,
            max_new_tokens=sample.max_new_tokens,
            sampling=sample.sampling,
            seed=sample.seed,
            cache=sample.cache,
        )
        return [p + text for p, text in zip(sample.prompts, texts, strict=True)]

    return draw


def _generate(arguments: argparse.Namespace) -> int:
    from jaxaccel.decoding.sampling import SamplingConfig

    # Before the checkpoint is read: a mistyped number should be told at once.
    sampling = SamplingConfig(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
    )
    prompts = arguments.prompt or [""]
    for prompt in prompts:
        _check_text("--prompt", prompt)
    if arguments.stream and len(prompts) > 1:
        raise ValueError(f"--stream prints one prompt, {len(prompts)} are given")
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max_new_tokens={arguments.max_new_tokens} is less than 1")
    cache = _cache_plan(arguments)

    from jaxaccel.decoding.generate import generate_text
    from jaxaccel.training.checkpoint import load_checkpoint_model

    model, tokenizer = load_checkpoint_model(arguments.checkpoint)

    def show(row: int, text: str) -> None:
        print(text, end="", flush=True)

    if arguments.stream:
        show(0, prompts[0])
    texts = generate_text(
        model,
        tokenizer,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        sampling=sampling,
        seed=arguments.seed,
        stream=show if arguments.stream else None,
        cache=cache,
    )
    if arguments.stream:
        print()
        return 0
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        if len(prompts) > 1:
            print(f"--- {index + 1}")
        print(prompt + text)
    return 0


def _cache_plan(arguments: argparse.Namespace) -> CachePlanConfig | None:
    """The caches that gin options ask for, `None` if there are no such options."""
    given = _given_gin_options(arguments)
    if not given:
        return None
    if not arguments.gin_file:
        from jaxaccel.config.gin_utils import load_config

        return load_config(
            "CachePlanConfig",
            (),
            arguments.gin_bindings,
            assignments=arguments.gin_assignment,
            search_paths=arguments.gin_search_paths,
        )
    sample = _read_experiment(arguments).experiment.sample
    if sample is None or sample.cache is None:
        raise ValueError(
            f"generate takes the cache alone from {', '.join(given)}, and no "
            "SampleConfig.cache is set there"
        )
    return sample.cache


def _check_text(option: str, text: str) -> None:
    """Refuses an argument whose bytes the terminal's encoding cannot read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        given = os.fsencode(text)
        raise ValueError(f"{option}: {given!r} is not UTF-8 text") from None


def _describe(arguments: argparse.Namespace) -> int:
    from jaxaccel.models.describe import describe

    seq_len = arguments.seq_len
    if seq_len is not None and seq_len < 1:
        raise ValueError(f"--seq_len={seq_len} is less than 1")
    given = _given_gin_options(arguments)
    if arguments.checkpoint and given:
        raise ValueError(
            "describe --checkpoint takes the model as it was saved, and would ignore "
            f"{', '.join(given)}; give either --checkpoint or --gin_file"
        )
    if not arguments.checkpoint and not arguments.gin_file:
        raise ValueError("describe needs either --gin_file or --checkpoint")
    if arguments.checkpoint:
        config = _checkpoint_config(pathlib.Path(arguments.checkpoint))
    else:
        experiment = _read_experiment(arguments).experiment
        config = experiment.model.decoder()
        seq_len = experiment.data.seq_len if seq_len is None else seq_len
    print(describe(config, 4096 if seq_len is None else seq_len).table())
    return 0


def _checkpoint_config(folder: pathlib.Path) -> DecoderConfig:
    """The model of a run's folder, or of a folder in the format of Hugging Face."""
    if (folder / "config.json").is_file():
        from jaxaccel.models.hf import model_config

        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return model_config(raw).decoder()
    from jaxaccel.core.config_json import from_json
    from jaxaccel.training.checkpoint import find_checkpoint, read_metadata

    metadata = read_metadata(find_checkpoint(folder))
    return from_json(json.dumps(metadata["model_config"]))


def _report(arguments: argparse.Namespace) -> int:
    from jaxaccel.reports.html import write_report

    print(f"wrote {write_report(arguments.runs, arguments.out)}")
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    from jaxaccel import benchmarks

    return benchmarks.main(arguments.arguments) or 0
