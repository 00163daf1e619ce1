"""From names to a pair: a target, a draft, a tokenizer, checked to work together.

Knows which ids may be emitted and what ends a reply. Knows nothing of rounds or caches.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Iterable

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .compiled import Traces
from .drafters.saved import about, is_saved, load_saved
from .names import NO_DRAFT, Entry, catalogue, find, locate, pull
from .drafters.model import ModelDrafter, RecurrentDrafter
from .errors import PairError, SpecError
from .folder import apply_adapter, load_folder
from .gguf import default_dtype, load_gguf
from .hub import OnProgress
from .hidden import embedding, last_row, share_ends
from .probe import Profile, profile
from .prompts import turn_end

__all__ = ["Entry", "Pair", "catalogue", "find", "load", "pull"]

MAX_SPECIAL_DIFFERENCES = 16


class Pair:
    """A target and what speeds it up. Weights are evaluated in the thread that makes the pair. Raises PairError
    when the tokenizers give the same id to different strings.

    target, draft: loaded mlx-lm models; draft may be None (plain decoding), the target itself, or a
    module that reads the target's hidden states (`drafters/heads.py`, `drafters/mlp.py`).
    tokenizer: the target's, mlx-lm's wrapper or a Hugging Face tokenizer; None for work on ids.
    draft_tokenizer: the draft's, compared with it by content; None: not checked, make sure yourself.
    vocab_size: ids that may be emitted are 0 to vocab_size - 1; a head may have more rows.
    draft_vocab_size: ids that the draft may propose, at most vocab_size.
    draft_max_length: tokens the draft can read, None when unknown. end_ids: tokens that end a reply.
    notes: what a user should know. compiled, quantised, costs, learnt: what was found out about the
    models, the last by earlier requests.
    """

    def __init__(self, target: nn.Module, draft: nn.Module | None = None, tokenizer: Any = None, *,
                 draft_tokenizer: Any = None, name: str | None = None, draft_max_length: int | None = None,
                 notes: Iterable[str] = ()) -> None:
        if not callable(target):
            raise PairError(f"target must be a loaded mlx-lm model; got {type(target).__name__}: see mlx_lm.load")
        self.target, self.draft, self.name = target, draft, name
        raw = tokenizer is not None and not isinstance(tokenizer, TokenizerWrapper)
        self.tokenizer = TokenizerWrapper(tokenizer) if raw else tokenizer
        self.notes = tuple(notes)
        if draft is not None and self.tokenizer is not None and draft_tokenizer is not None:
            self.notes += compare_tokenizers(self.tokenizer, draft_tokenizer)
        for model in [target] if draft is None or draft is target else [target, draft]:
            # Not model.parameters(): tables such as rotary frequencies are arrays too, and a lazy
            # array can't be evaluated in another thread than the one that made it.
            mx.eval(model)
        self._probe()
        rows = self.target_profile.head_rows
        self.vocab_size = rows if self.tokenizer is None else min(rows, max(self.tokenizer.get_vocab().values()) + 1)
        self.draft_vocab_size = None if draft is None else min(self.draft_profile.head_rows, self.vocab_size)
        if draft is not None and draft_max_length is None:
            draft_max_length = _max_length(draft)
        self.draft_max_length = draft_max_length
        self.end_ids = _end_ids(self.tokenizer)
        self.compiled = Traces()
        self.quantised: dict = {}
        self.costs: Any = None
        self.learnt: dict[str, Any] = {}

    def _probe(self) -> None:
        """What the models' caches are and whether they can be verified in rows is tried here, once."""
        self.target_profile = profile(self.target)
        self.draft_profile = self.target_profile
        if self.draft is None:
            self.draft_profile = None
        elif hasattr(self.draft, "bind"):
            self.draft_profile = self._bind()
        elif self.draft is not self.target:
            self.draft_profile = profile(self.draft)
        for role, found in (("target", self.target_profile), ("draft", self.draft_profile)):
            if found is not None and found.reason:
                self.notes += (f"plain decoding: the {role} can't speculate, {found.reason}",)

    def _bind(self) -> Profile:
        """Join a draft on hidden states with the target."""
        target = self.target_profile
        if target.reason:
            return Profile(reason="the target decodes plainly")
        if target.hidden_reason:
            raise PairError(f"a draft on hidden states can't be used with this target: {target.hidden_reason}; "
                            "use a draft model")
        self.draft.bind(self.target, target.layers[0].dtype)
        return Profile(self.draft, self.draft.cache_layers(), target.head_rows)

    def drafter(self) -> Any:
        """What proposes: a draft on hidden states brings its own, a language model is given one."""
        draft, found = self.draft, self.draft_profile
        if hasattr(draft, "drafter"):
            return draft.drafter(found.layers, self.vocab_size)
        if found.recurrent:
            return RecurrentDrafter(found.runs(), found.layers, self.draft_vocab_size)
        model = draft if found.hidden_reason else last_row(draft)
        return ModelDrafter(found.runs(model), found.layers, self.draft_vocab_size)

    def __repr__(self) -> str:
        return f"Pair({self.name or type(self.target).__module__}, draft={'yes' if self.draft is not None else 'no'})"


def _max_length(model: nn.Module) -> int | None:
    args = getattr(model, "args", None)
    for source in (args, getattr(args, "text_config", None)):
        facts = source if isinstance(source, dict) else getattr(source, "__dict__", {})
        if value := facts.get("max_position_embeddings"):
            return int(value)
    return None


def _end_ids(tokenizer: TokenizerWrapper | None) -> frozenset[int]:
    if tokenizer is None:
        return frozenset()
    ends = {*tokenizer.eos_token_ids, tokenizer.eos_token_id, turn_end(tokenizer)}
    return frozenset(int(i) for i in ends if i is not None)


def compare_tokenizers(target: Any, draft: Any) -> tuple[str, ...]:
    """Notes on special tokens that differ; the same id must otherwise mean the same string. Ids that only one of them
    has do no harm: the draft is cut to what the target knows. Raises PairError."""
    ours, theirs = ({i: s for s, i in t.get_vocab().items()} for t in (target, draft))
    special = _special_ids(target) | _special_ids(draft)
    differing = [i for i in sorted(ours.keys() & theirs.keys()) if ours[i] != theirs[i]]
    missing = [i for i in sorted(ours.keys() - theirs.keys()) if i in special]
    ordinary = [i for i in differing if i not in special]
    if ordinary or len(differing) > MAX_SPECIAL_DIFFERENCES:
        i = (ordinary or differing)[0]
        raise PairError(f"the draft has another tokenizer: id {i} is {ours[i]!r} for the target and "
                        f"{theirs[i]!r} for the draft ({len(differing)} ids differ); choose a draft of the same family")
    notes = []
    if differing or missing:
        i = (differing or missing)[0]
        notes.append(f"the draft's special tokens differ in {len(differing) + len(missing)} places, first at id {i} "
                     f"({ours[i]!r}); replies are not affected")
    if draft.eos_token_id is not None and draft.eos_token_id != target.eos_token_id:
        notes.append("the draft has another end token; the target's decides")
    return tuple(notes)


def _special_ids(tokenizer: Any) -> set[int]:
    return {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}


def load(target: str | Path, draft: str | Path | bool | None = None, *, adapter_path: str | Path | None = None,
         draft_adapter_path: str | Path | None = None, revision: str | None = None, draft_revision: str | None = None,
         trust_remote_code: bool = False, draft_required: bool = True, on_progress: OnProgress | None = None) -> Pair:
    """Loads a pair, downloading what is not on this machine. Raises PairError and DownloadError, one line each; for the
    draft they begin with "draft".

    target: a name of the catalogue, a hub repository, an mlx-lm model folder or a .gguf file. draft: likewise, or a
    draft on the target's hidden states; None is the catalogue's draft if the target's name is a pair's, otherwise no
    draft; False and "none" are no draft. The target's adapter never reaches it. draft_required: False turns a draft
    that fails into a note on a pair without one. on_progress: called with (bytes done, bytes in all) while downloading.
    """
    target = str(target)
    entry = find(target)
    if draft is not False and not isinstance(draft, (str, os.PathLike, type(None))):
        raise PairError(f"draft must be a name, a folder, 'none' or None (the pair's own); got {draft!r}")
    if draft is None and entry is not None:
        draft = entry.draft_name
    if draft in (None, NO_DRAFT) and (draft_adapter_path or draft_revision):
        raise PairError("draft: there is none that could take the adapter or the revision; name one, or leave them out")
    if draft == "self":
        draft, draft_revision = target, draft_revision or revision
    model, tokenizer, notes = _load_one(target, adapter_path, revision, trust_remote_code, on_progress)
    if draft in (None, False, NO_DRAFT):
        return Pair(model, None, tokenizer, name=target, notes=notes)
    try:
        if (str(draft), draft_revision, draft_adapter_path) == (target, revision, adapter_path):
            return Pair(model, model, tokenizer, name=target, notes=notes)
        return _join(model, tokenizer, target, notes, str(draft), draft_adapter_path, draft_revision, trust_remote_code,
                     on_progress)
    except SpecError as e:
        if draft_required:
            raise type(e)(f"{f'draft {draft}'.strip()}: {e}") from e
        return Pair(model, None, tokenizer, name=target, notes=(*notes, f"draft off: {e}"))


def join(pair: Pair, draft: str) -> Pair:
    """The same target with that draft, by its name. Raises PairError and DownloadError."""
    return _join(pair.target, pair.tokenizer, pair.name, pair.notes, draft)


def _join(model: nn.Module, tokenizer: TokenizerWrapper, target: str, notes: tuple[str, ...], draft: str,
          adapter: str | Path | None = None, revision: str | None = None, trusted: bool = False,
          on_progress: OnProgress | None = None) -> Pair:
    path = locate(draft, revision, on_progress)
    if is_saved(path):
        if adapter is not None:
            raise PairError("a draft on hidden states takes no adapter")
        return Pair(model, load_saved(path), tokenizer, name=target, notes=(*notes, *_made_for(path, target)))
    other, other_tokenizer, _ = _load_one(draft, adapter, revision, trusted, on_progress)
    if path.is_dir() and about(path).get("kind") == "draft":
        share_ends(other, model, embedding(model)[1](mx.array([0])).dtype)
    return Pair(model, other, tokenizer, draft_tokenizer=other_tokenizer, name=target, notes=notes)


def _made_for(draft: Path, target: str) -> tuple[str, ...]:
    """A note where a saved draft was made for another target than this one."""
    made_for = about(draft).get("target")
    other = made_for and _last_part(str(made_for)) != _last_part(target)
    return (f"the draft was made for {made_for}: acceptance may be low with {target}",) if other else ()


def _last_part(name: str) -> str:
    """Of a hub name or a path, for the same model can be in several places."""
    entry = find(name)
    return os.path.basename(os.path.abspath(entry.target if entry else name)).removesuffix(".gguf").lower()


def _load_one(name: str, adapter: str | Path | None, revision: str | None, trusted: bool,
              on_progress: OnProgress | None) -> tuple[nn.Module, TokenizerWrapper, tuple[str, ...]]:
    path, entry = locate(name, revision, on_progress), find(name)
    if is_saved(path):
        raise PairError(f"{path} is a draft on hidden states, not a model: give it as the draft of its target")
    if path.is_dir():
        model, tokenizer = load_folder(path, trust_remote_code=trusted)
        if entry is not None and entry.unquantised:
            model.set_dtype(default_dtype())
    else:
        model, tokenizer = load_gguf(path, default_dtype())
    from_wheel = entry is not None and not path.is_dir()
    notes = (f"{name}: 4-bit weights out of a Python package, not the hub's",) if from_wheel else ()
    return (model if adapter is None else apply_adapter(model, adapter)), tokenizer, notes
