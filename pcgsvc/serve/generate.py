"""Generation: prompts of any number, over slots, to their ends.

In: prompts. Out: continuations. Every kind of batch runs for real: prompts of several requests in
one flat batch (in chunks where they are longer than the largest capture size), beside the tokens of
those that are past their prompt, and uniform decode. Knows nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pcgsvc.errors import BatchError, ConfigError
from pcgsvc.events import span
from pcgsvc.forward.sampling import Sampling
from pcgsvc.serve.continuation import NewToken
from pcgsvc.serve.slots import Slots
from pcgsvc.serve.steps import StepRunner


def generate(
    runner: StepRunner,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int = 16,
    *,
    sampling: Sampling | None = None,
    slots: int | None = None,
    return_ids: bool = False,
) -> Any:
    """Continue prompts.

    Args:
        runner: of a language model with a tokenizer. Other threads' calls wait until all is
            generated.
        prompts: texts, any number; nothing is added to them but what the tokenizer adds. Lists of
            token ids are taken as they are.
        max_new_tokens: most tokens per prompt, at least 1.
        sampling: for every prompt; None: the checkpoint's generation config, or greedy if it says
            nothing. `Sampling()` is greedy.
        slots: how many run at once; None: as many as one captured step holds.
        return_ids: return token ids instead of text.

    Returns:
        Per prompt the continuation only, special tokens left out; stops at an end token or before
        a stop text. Ids include those of the stop text.

    Raises:
        ConfigError: the model has no tokenizer or is no language model.
        BatchError: no prompt, an empty one, one too long or with unknown tokens, or other users of
            the runner hold the KV blocks that one prompt needs.
    """
    runner.ensure_open()
    given: Any = prompts
    if isinstance(given, str):
        raise BatchError("prompts: got one text, a list of texts is needed: generate([text]).")
    if isinstance(given, bytes) or not isinstance(given, Sequence):
        raise BatchError(
            f"prompts: got {type(given).__name__}; a list of texts, or of lists of token ids, is "
            "needed (of a tensor: tensor.tolist())."
        )
    bundle = runner.request.bundle
    if bundle.is_language_model and bundle.tokenizer is None and not return_ids:
        raise ConfigError(
            "generate: this model has no tokenizer. Give prompts as token ids and return_ids=True."
        )
    if not prompts:
        raise BatchError("prompts: at least one is needed, and none may be empty.")
    with (
        span("pcgsvc.generate", prompts=len(prompts)),
        Slots(runner, max_requests=slots) as several,
        runner.lock,
    ):
        made = [several.prepare(p, max_new_tokens, sampling, live_text=False) for p in prompts]
        for _ in several.run(made):
            pass
    return [c.new if return_ids else c.text for c in made]


def stream(
    runner: StepRunner,
    prompt: str | Sequence[int],
    max_new_tokens: int = 16,
    *,
    sampling: Sampling | None = None,
) -> Iterator[NewToken]:
    """Continue one prompt and yield its tokens as they come; arguments and errors as `generate`.

    The texts of all tokens make the continuation's text. Other threads may call the runner between
    two tokens. KV blocks are held until the iterator ends, or is closed or dropped.
    """
    slots = Slots(runner, max_requests=1)
    continuation = slots.prepare(prompt, max_new_tokens, sampling)
    return (token for tokens in slots.run([continuation]) for token in tokens)
