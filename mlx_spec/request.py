"""What a request and a pair are together: what of the options can't be, how k is chosen, where drafts
come from and, where they don't, why. Knows nothing of rounds.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Sequence

from . import sampling
from .control import DRAFT, LOOKUP, Auto, Controller, Fixed, Learnt
from .costs import measure
from .probe import why_not_quantised
from .types import Options


def controller(pair: Any, options: Options) -> Controller:
    if options.num_draft_tokens != "auto":
        return Fixed(options.num_draft_tokens)
    # Under block and token a seed's text depends on every k, and the result names the seed that was drawn.
    steady = options.reproducible or (options.temperature > 0 and options.verify != "match")
    learnt = Learnt(options.task) if steady else pair.learnt.setdefault(options.task, Learnt(options.task))
    return Auto(partial(measure, pair), learnt, clocked=not steady)


def sources(
    pair: Any, ids: Sequence[int], options: Options, controller: Controller, drafter: Any = None
) -> tuple[dict[str, int], str]:
    """The largest k of each source that can be used, none for plain decoding; and what to call that,
    with the reason. drafter: in place of the pair's draft."""
    largest, wanted = controller.largest, controller.sources
    reason = _why_plain(pair, largest)
    no_draft = reason or (None if drafter is not None or DRAFT not in wanted else _why_no_draft(pair, len(ids)))
    limit = getattr(pair.draft if drafter is None else drafter, "largest", None)
    found = {DRAFT: min(largest, limit or largest)} if DRAFT in wanted and not no_draft else {}
    if LOOKUP in wanted and not reason:
        found[LOOKUP] = largest
    if not found:
        return found, f"plain ({no_draft})"
    if not all(sampling.is_pure(p) for p in options.logits_processors):
        rule = ", verified by token" if options.verify == "block" else ""
        return found, f"speculative, position by position{rule} (a logits processor may keep state)"
    return found, "speculative" if DRAFT in found else f"speculative by prompt lookup ({no_draft})"


def _why_plain(pair: Any, largest: int) -> str | None:
    if pair.target_profile.reason:
        return f"the target decodes plainly: {pair.target_profile.reason}"
    return "no draft tokens asked for" if largest == 0 else None


def _why_no_draft(pair: Any, length: int) -> str | None:
    if pair.draft is None:
        return "no draft"
    if pair.draft_profile.reason:
        return f"the draft can't be used: {pair.draft_profile.reason}"
    limit = pair.draft_max_length
    if limit is not None and length + 2 > limit:
        return f"the draft reads at most {limit} tokens and the prompt has {length}"
    return None


def check(pair: Any, ids: Sequence[int], options: Options) -> None:
    """What only a request and a pair together can show to be wrong. Raises ValueError, one line."""
    if not ids:
        raise ValueError("the prompt is empty: give at least one token")
    if not 0 <= options.top_k < pair.vocab_size:
        raise ValueError(f"top_k must be 0 (off) to {pair.vocab_size - 1} for this model; got {options.top_k}")
    for name, values in (("prompt", ids), ("logit_bias", options.logit_bias or ())):
        bad = next((i for i in values if not 0 <= i < pair.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{name}: token id {bad} is not one of this model's, 0 to {pair.vocab_size - 1}")
    if options.stop and pair.tokenizer is None:
        raise ValueError("stop: strings can't be found without a tokenizer; make the pair with one")
    if options.max_kv_size is not None:
        _check_bounded(pair, options)
    if options.kv_bits is not None:
        reason = why_not_quantised(pair, pair.target_profile, options.kv_bits, options.kv_group_size)
        if reason:
            raise ValueError(f"kv_bits can't be used with this target: {reason}; leave it out")


def _check_bounded(pair: Any, options: Options) -> None:
    profiles = {"target": pair.target_profile}
    if pair.draft is not None and options.num_draft_tokens:
        profiles["draft"] = pair.draft_profile
    for role, p in profiles.items():
        if p.reason or p.special:
            raise ValueError(f"max_kv_size can't be honoured: the {role} makes caches of its own kind; leave it out")
