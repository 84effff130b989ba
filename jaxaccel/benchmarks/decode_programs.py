"""The programs that `jaxaccel bench decode` compares."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxaccel.benchmarks.guards import implementations_used, kernels_in
from jaxaccel.cache.decoder import DecoderCache
from jaxaccel.config.gin_utils import load_experiment
from jaxaccel.core.tree import flatten_state, num_stacked_axes, unflatten_state
from jaxaccel.data.batch import packing_metadata
from jaxaccel.data.pipeline import DataConfig
from jaxaccel.data.sources import split_documents
from jaxaccel.decoding import speculative
from jaxaccel.decoding.generate import Draw, row_keys
from jaxaccel.decoding.layer_loop import read_tokens
from jaxaccel.decoding.sampling import SamplingConfig
from jaxaccel.decoding.waterfall import DecodeBenchConfig, Settings, unknown_ops
from jaxaccel.models.config import DecoderConfig
from jaxaccel.models.decoder import Decoder, init_decoder
from jaxaccel.nn.implementation import OPS
from jaxaccel.training.checkpoint import find_checkpoint, load_checkpoint_model
from pallas_kernels._common.dispatch import recorded_choices


GREEDY = SamplingConfig(temperature=0.0)

# What a model's weights do not depend on.
_FREE = ("dtype", "param_dtype", "remat_policy", "implementation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """One set of weights; models of several layouts are made of it.

    Attributes:
      config: the model, its layers scanned.
      state: its parameters.
      tokenizer, data: of a run that trained them; `None` for random ones.
    """

    config: DecoderConfig
    state: Any
    tokenizer: Any = None
    data: DataConfig | None = None

    @classmethod
    def random(cls, config: DecodeBenchConfig) -> Self:
        """Draws the weights of the benchmark's model."""
        decoder = config.model.decoder()
        _, state = nnx.split(init_decoder(decoder, config.seed))
        return cls(config=decoder, state=state)

    @classmethod
    def trained(cls, config: DecodeBenchConfig) -> Self:
        """Reads those of `config.checkpoint`, as the benchmark's model keeps them.

        Raises:
          FileNotFoundError: there is no checkpoint, or no config beside it.
          ValueError: the checkpoint is of another model.
        """
        assert config.checkpoint is not None
        decoder = config.model.decoder()
        model, tokenizer = load_checkpoint_model(config.checkpoint)
        for field in dataclasses.fields(DecoderConfig):
            own, theirs = (getattr(x, field.name) for x in (decoder, model.config))
            if own != theirs and field.name not in _FREE:
                raise ValueError(
                    f"{config.checkpoint} is of another model: its {field.name} is "
                    f"{theirs!r}, that of {type(config.model).__name__} {own!r}"
                )
        template = nnx.split(_abstract(decoder))[1]
        wanted, found = flatten_state(template), flatten_state(nnx.split(model)[1])
        arrays = {name: x.astype(wanted[name].dtype) for name, x in found.items()}
        run = load_experiment([find_checkpoint(config.checkpoint) / "config.gin"])
        return cls(
            config=decoder,
            state=unflatten_state(template, arrays),
            tokenizer=tokenizer,
            data=run.data,
        )

    def prompts(self, config: DecodeBenchConfig, batch: int) -> jax.Array:
        """i32[B, T]: random tokens, or for trained weights text that they never read.

        Raises:
          ValueError: there are fewer texts of this length than rows.
        """
        shape = (batch, config.prompt_length)
        if self.data is None:
            key = jax.random.fold_in(jax.random.key(config.seed), batch)
            return jax.random.randint(key, shape, 0, self.config.vocab_size)
        documents = itertools.chain.from_iterable(self.data.sources)
        texts = split_documents(documents, "heldout", self.data.heldout_fraction)
        tokens = (self.tokenizer.encode(text.text) for text in texts)
        long = (x[: shape[1]] for x in tokens if len(x) >= shape[1])
        rows = list(itertools.islice(long, batch))
        if len(rows) < batch:
            raise ValueError(
                f"{len(rows)} held-out texts have prompt_length={shape[1]} tokens, "
                f"batch={batch} needs as many"
            )
        return jnp.asarray(np.stack(rows), jnp.int32)

    @property
    def model(self) -> Decoder:
        """The model as its config says."""
        return nnx.merge(_structure(self.config), self.state)

    @property
    def num_parameters(self) -> int:
        """Parameters, the prediction block's included."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state))

    def layout(self, step: Settings) -> tuple[Any, Any]:
        """Graph definition and state of the model that a step runs."""
        config, setting = self.config, self.config.implementation
        if not step.jit:
            # A kernel is no single operation: without a program around it, none runs.
            config = dataclasses.replace(config, implementation="xla")
        elif step.fused:
            before = (
                dict.fromkeys(OPS, setting) if isinstance(setting, str) else setting
            )
            config = dataclasses.replace(
                config, implementation={**dict(before or ()), **dict(step.fused)}
            )
        if step.layers != "unrolled":
            return _structure(config), self.state
        config = dataclasses.replace(config, pattern=config.layer_types)
        graphdef, template = nnx.split(_abstract(config))
        return graphdef, unflatten_state(template, self.by_layer)

    @functools.cached_property
    def layers(self) -> list[Any]:
        """Parameters of each layer, in order: one copy for all steps."""
        stacked = [nnx.split(block)[1] for block in self.model.layers]
        return [jax.tree.map(lambda leaf: leaf[0], x) for x in unstack(stacked)]

    @functools.cached_property
    def by_layer(self) -> dict[str, jax.Array]:
        """Parameters by name, an array for each layer: one copy for all steps."""
        period, arrays = len(self.config.pattern), {}
        for name, array in flatten_state(self.state).items():
            if not num_stacked_axes(name):
                arrays[name] = array
                continue
            layers, position, rest = name.split("/", 2)
            for index in range(self.config.num_periods):
                layer = index * period + int(position)
                arrays[f"{layers}/{layer}/{rest}"] = array[index : index + 1]
        return arrays


def unstack(stacked: Sequence[Any]) -> list[Any]:
    """Trees per position of the pattern -> trees per layer, a leading axis of 1."""
    periods = jax.tree.leaves(stacked[0])[0].shape[0]
    return [
        jax.tree.map(lambda leaf, p=period: leaf[p : p + 1], tree)
        for period in range(periods)
        for tree in stacked
    ]


@dataclasses.dataclass(kw_only=True)
class Launch:
    """A step, ready to run.

    Attributes:
      start: () -> what `run` takes: the caches after the prompt, its own copy.
      run: (that, N) -> tokens i32[B, M], M >= N of them drawn, on the host.
      runs: op -> implementation that was traced.
      text: the compiled program, "" where there is none.
      temp_bytes: temporaries of the compiled program; `None` where there is none.
      acceptance: how drafts fared in the last run; `None` without them.
    """

    start: Callable[[], Any]
    run: Callable[[Any, int], np.ndarray]
    runs: dict[str, str]
    text: str = ""
    temp_bytes: int | None = None
    acceptance: speculative.Acceptance | None = None

    @property
    def kernels(self) -> set[str]:
        """Names of the kernels in the program."""
        return kernels_in(self.text)


# A step that does not compile is told where it is run, beside others that did.
Compiled = Launch | jax.errors.JaxRuntimeError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Carry:
    """Between two calls: the newest token of each row, i32[B], and the cache."""

    last: jax.Array
    cache: Any


# (parameters, tokens i32[B, 1], cache) -> hidden [B, 1, D], cache, and `unembed`.
Reader = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any, Callable[..., Any]]]


def refusals(config: DecodeBenchConfig) -> dict[str, str]:
    """Step -> why this machine cannot run it."""
    found = {}
    if unknown := unknown_ops(config.fused):
        found["fused_kernel"] = f"no layer has the op {', '.join(unknown)}"
    elif "fused_kernel" in config.steps and (reason := _refused(config)):
        found["fused_kernel"] = reason
    if jax.default_backend() != "gpu":
        found["command_buffers"] = (
            f"command buffers are CUDA graphs, this is {jax.default_backend()}"
        )
    return found


def _refused(config: DecodeBenchConfig) -> str:
    """Why the ops of `fused` cannot run what is named; "" if they can."""
    step = Settings(
        step="", jit=True, fused=tuple(config.fused.items()), layers="copied"
    )
    decoder = config.model.decoder()
    _, state = nnx.split(_abstract(decoder))
    graphdef, _ = Weights(config=decoder, state=state).layout(step)

    def read(state, batch):
        cache = nnx.merge(graphdef, state).init_cache(batch, _slots(config))
        tokens = jnp.zeros((batch, 1), jnp.int32)
        return _copied(graphdef)(state, tokens, cache)[:2]

    try:
        for batch in config.batches:
            jax.eval_shape(functools.partial(read, batch=batch), state)
    except NotImplementedError as error:
        return str(error)
    return ""


def prefill(
    weights: Weights, prompts: jax.Array, config: DecodeBenchConfig
) -> tuple[Carry, jax.Array]:
    """What all steps begin from, and the hidden states [B, T, D] of the prompts.

    One program for all of them: it is compiled by the first call.
    """
    return _prefill(_structure(weights.config), _slots(config), weights.state, prompts)


def reference_tokens(
    weights: Weights, step: Settings, prompts: jax.Array, config: DecodeBenchConfig
) -> tuple[np.ndarray, np.ndarray]:
    """The first step's tokens i32[B, N] and the logits f32[B, N, V] behind them."""
    read, params = _reader(weights, step)
    carry = _prefilled(weights, step, prompts, config)

    def one(params, carry):
        hidden, cache, unembed = read(params, carry.last[:, None], carry.cache)
        logits = unembed(hidden)[:, 0]
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        return Carry(last=best, cache=cache), logits

    one = jax.jit(one) if step.jit else one
    tokens, logits = [], []
    for _ in range(config.check_tokens):
        carry, scores = one(params, carry)
        tokens.append(np.asarray(carry.last))
        logits.append(np.asarray(scores))
    return np.stack(tokens, axis=1), np.stack(logits, axis=1)


def same_program(step: Settings) -> Settings:
    """Equal for steps that differ in how they are compiled alone."""
    return dataclasses.replace(step, step="", command_buffers=False)


def build(
    weights: Weights,
    steps: Sequence[Settings],
    prompts: jax.Array,
    config: DecodeBenchConfig,
) -> dict[Settings, Compiled]:
    """Compiles steps of the same program, which is traced and lowered once.

    Args:
      weights: the model.
      steps: how they decode.
      prompts: i32[B, T].
      config: the benchmark.

    Returns:
      The steps, compiled and not yet run, or what compiling one raised.

    Raises:
      NotImplementedError: an op refuses what is named for it.
    """
    step = steps[0]
    if step.num_drafts:
        return _speculative(weights, steps, prompts, config)
    read, params = _reader(weights, step)
    filled = _prefilled(weights, step, prompts, config)

    def start() -> Carry:
        return jax.tree.map(jnp.copy, filled)

    def one(params, carry):
        hidden, cache, unembed = read(params, carry.last[:, None], carry.cache)
        best = jnp.argmax(unembed(hidden)[:, 0], axis=-1).astype(jnp.int32)
        return Carry(last=best, cache=cache), best[:, None]

    def several(params, carry):
        def body(carry, _):
            carry, best = one(params, carry)
            return carry, best[:, 0]

        carry, drawn = jax.lax.scan(body, carry, length=step.tokens_per_call)
        return carry, drawn.T

    if not step.jit:
        with recorded_choices() as choices:
            one(params, filled)

        def run_eagerly(carry, count):
            return _collect(lambda carry: one(params, carry), carry, count, 1)

        runs = implementations_used(choices)
        return {s: Launch(start=start, run=run_eagerly, runs=runs) for s in steps}
    call = jax.jit(
        one if step.tokens_per_call == 1 else several,
        donate_argnums=1 if step.donate else (),
    )

    def launch(compiled, about):
        def run(carry, count):
            each = step.tokens_per_call
            return _collect(lambda carry: compiled(params, carry), carry, count, each)

        return Launch(start=start, run=run, **about)

    return _compile(config, steps, launch, call, params, filled)


def _collect(call, carry, count: int, each: int) -> np.ndarray:
    """Calls until `count` tokens are drawn, `each` a call; waits for all at the end."""
    drawn = []
    for _ in range(-(-count // each)):
        carry, tokens = call(carry)
        drawn.append(tokens)
    return np.concatenate([np.asarray(tokens) for tokens in drawn], axis=1)


def _speculative(
    weights: Weights,
    steps: Sequence[Settings],
    prompts: jax.Array,
    config: DecodeBenchConfig,
) -> dict[Settings, Compiled]:
    step = steps[0]
    # Verifying always carries the caches, whatever steps were left out.
    layers = config.layers if step.layers in ("python", "copied") else step.layers
    graphdef, state = weights.layout(dataclasses.replace(step, layers=layers))
    draw = Draw(sampling=GREEDY, vocab_limit=weights.config.vocab_size)
    keys, stops = row_keys(0, prompts.shape[0]), jnp.asarray([-1], jnp.int32)
    # One more than asked: the token that the other steps begin from is drawn already.
    capacity = 1 + max(config.new_tokens, config.check_tokens)
    limit = jnp.int32(capacity)
    filled = _begin(
        _structure(weights.config),
        (step.num_drafts, _slots(config), capacity),
        weights.state,
        *prefill(weights, prompts, config),
        prompts,
        stops,
        limit,
    )
    if layers == "unrolled":
        filled = dataclasses.replace(filled, cache=_unrolled(filled.cache))

    def launch(compiled, about):
        def run(carry, count):
            carry = compiled(state, carry, keys, stops, jnp.int32(count + 1))
            tokens = np.asarray(carry.tokens)[:, 1 : count + 1]
            own.acceptance = speculative.acceptance(np.asarray(carry.histogram))
            return tokens

        own = Launch(start=lambda: jax.tree.map(jnp.copy, filled), run=run, **about)
        return own

    return _compile(
        config,
        steps,
        launch,
        speculative.decode,
        graphdef,
        step.num_drafts,
        draw,
        state,
        filled,
        keys,
        stops,
        limit,
    )


def _compile(
    config: DecodeBenchConfig,
    steps: Sequence[Settings],
    launch: Callable[..., Launch],
    function: Any,
    *arguments: Any,
) -> dict[Settings, Compiled]:
    """Lowers once, compiles for each step; `launch` gets a program and what it is."""
    with recorded_choices() as choices:
        lowered = function.lower(*arguments)

    def one(step: Settings) -> Compiled:
        kinds = config.command_buffers if step.command_buffers else ""
        options = {} if kinds is None else {"xla_gpu_enable_command_buffer": kinds}
        try:
            compiled = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            return error  # of this step alone: the others have their rows
        memory = compiled.memory_analysis()
        about = {
            "runs": implementations_used(choices),
            "text": compiled.as_text() or "",
            "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
        }
        return launch(compiled, about)

    with concurrent.futures.ThreadPoolExecutor(len(steps)) as pool:
        return dict(zip(steps, pool.map(one, steps), strict=True))


def _reader(weights: Weights, step: Settings) -> tuple[Reader, Any]:
    graphdef, state = weights.layout(step)
    if step.layers == "copied":
        return _copied(graphdef), state
    if step.layers != "python":
        return _carried(graphdef), state
    runs = len(weights.config.runs)
    if runs > 1 or weights.config.engram is not None:
        raise ValueError(
            f"a layer loop in Python reads one repeating pattern without a memory, the "
            f"model has {runs} runs and engram={weights.config.engram}; leave out the "
            "steps with layers='python'"
        )
    model = nnx.merge(graphdef, state)
    parts = [nnx.split(block)[0] for block in model.layers]
    structures = parts * weights.config.num_periods

    def read(params, tokens, cache):
        state, layers = params
        model = nnx.merge(graphdef, state)
        caches, length = cache
        meta = packing_metadata(
            (tokens.shape[0], 1),
            segment_ids=jnp.ones_like(tokens),
            cached_length=length,
        )
        x, after = model.embed(tokens), []
        for structure, layer, part in zip(structures, layers, caches, strict=True):
            x, part, _ = nnx.merge(structure, layer)(x, meta, part, length)
            after.append(part)
        return model.final_norm(x), (after, length + 1), model.unembed

    return read, (state, weights.layers)


def _copied(graphdef: Any) -> Reader:
    def read(state, tokens, cache):
        model = nnx.merge(graphdef, state)
        output = model(tokens, jnp.ones_like(tokens), cache=cache)
        return output.hidden, output.cache, model.unembed

    return read


def _carried(graphdef: Any) -> Reader:
    def read(state, tokens, cache):
        model = nnx.merge(graphdef, state)
        hidden, cache = read_tokens(model, tokens, jnp.ones_like(tokens), cache)
        return hidden, cache, model.unembed

    return read


def _prefilled(
    weights: Weights, step: Settings, prompts: jax.Array, config: DecodeBenchConfig
) -> Carry:
    """The caches after the prompt, in a step's layout, and the first token."""
    carry, _ = prefill(weights, prompts, config)
    if step.layers == "python":
        layers = unstack(carry.cache.layers)
        layers = [jax.tree.map(lambda leaf: leaf[0], layer) for layer in layers]
        return Carry(last=carry.last, cache=(layers, carry.cache.length))
    if step.layers == "unrolled":
        return Carry(last=carry.last, cache=_unrolled(carry.cache))
    return carry


def _slots(config: DecodeBenchConfig) -> int:
    """Slots of all steps' caches: attention reads every one, taken or not."""
    drawn = max(config.new_tokens, config.check_tokens, config.op_by_op_tokens)
    # Calls and drafts may go beyond what is asked.
    beyond = max(config.tokens_per_call, config.num_drafts + 2)
    return config.prompt_length + drawn + beyond


@functools.partial(jax.jit, static_argnums=(0, 1))
def _prefill(
    graphdef: Any, slots: int, state: Any, prompts: jax.Array
) -> tuple[Carry, jax.Array]:
    model = nnx.merge(graphdef, state)
    output = model(prompts, cache=model.init_cache(prompts.shape[0], slots))
    last = jnp.argmax(model.unembed(output.hidden[:, -1]), axis=-1)
    return Carry(last=last.astype(jnp.int32), cache=output.cache), output.hidden


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begin(
    graphdef: Any,
    shape: tuple[int, int, int],
    state: Any,
    carry: Carry,
    hidden: jax.Array,
    prompts: jax.Array,
    stops: jax.Array,
    limit: jax.Array,
) -> speculative.SpeculativeCarry:
    segments = jnp.ones_like(prompts)
    return speculative.begin(
        nnx.merge(graphdef, state),
        shape,
        hidden,
        carry.cache,
        prompts,
        segments,
        carry.last,
        stops,
        limit,
    )


def _unrolled(cache: DecoderCache) -> DecoderCache:
    return dataclasses.replace(cache, layers=tuple(unstack(cache.layers)))


def _abstract(config: DecoderConfig) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))


def _structure(config: DecoderConfig) -> Any:
    return nnx.split(_abstract(config))[0]
