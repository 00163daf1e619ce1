"""Prompts to ids: text, ids and messages, and templates that refuse."""

import numpy as np
import pytest
import tiny
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import AddedToken

from mlx_spec import prompts
from mlx_spec.prompts import MERGED, PLAIN_TEXT, SYSTEM_FOLDED, encode

TOK = tiny.byte_tokenizer()
USER, SYSTEM = {"role": "user", "content": "hello"}, {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "hi"}

NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
DROPS_SYSTEM = "{% for m in messages if m['role'] != 'system' %}<bos>{{ m['role'] }}\n{{ m['content'] }}<eos>\n{% endfor %}{{ '<bos>assistant\n' }}"
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)


def with_template(template: str | None) -> TokenizerWrapper:
    return tiny.byte_tokenizer(chat_template=template)


def text_of(tokenizer, messages, **options) -> tuple[str, tuple[str, ...]]:
    ids, notes = encode(tokenizer, messages, **options)
    return tokenizer.decode(ids), notes


def test_text_is_encoded_as_mlx_lm_does():
    assert encode(TOK, "Hi 7🙂") == (list("Hi 7🙂".encode()), ())
    assert encode(TOK, "<bos>Hi") == ([tiny.BOS, *b"Hi"], ())


def test_ids_of_any_integer_kind_pass_through_and_are_checked():
    assert encode(TOK, [1, 2, 258]) == ([1, 2, 258], ())
    ids, _ = encode(None, np.array([3, 4], dtype=np.uint32), vocab_size=10)
    assert ids == [3, 4] and all(type(i) is int for i in ids)
    for bad in ([259], [-1], [1.5], [True], ["a"], [None]):
        with pytest.raises(ValueError, match="token ids"):
            encode(TOK, bad)
    with pytest.raises(ValueError, match="from 0 to 9; got 10"):
        encode(None, [10], vocab_size=10)
    for bad in (None, 7, b"x", {"role": "user", "content": "x"}):
        with pytest.raises(ValueError, match=f"must be text, token ids or messages; got {type(bad).__name__}$"):
            encode(TOK, bad)


def test_text_without_a_tokenizer_says_what_to_give():
    for prompt in ("hi", [USER]):
        with pytest.raises(ValueError, match="as token ids"):
            encode(None, prompt)


# --- empty and odd input (A64, A65, A67)


def test_an_empty_prompt_is_the_start_token_or_a_clear_error_a64():
    assert encode(TOK, "") == ([tiny.BOS], ()) == encode(TOK, [])
    assert encode(TOK, [tiny.BOS]) == ([tiny.BOS], ())
    assert encode(TOK, "   ")[0] == [32, 32, 32]
    no_start = tiny.byte_tokenizer()
    no_start._tokenizer.bos_token = None
    for tokenizer, prompt in ((no_start, ""), (no_start, []), (None, [])):
        with pytest.raises(ValueError, match="the prompt is empty"):
            encode(tokenizer, prompt)


def test_messages_that_render_to_nothing_are_an_empty_prompt_a65():
    assert encode(with_template("{{ messages[0]['content'] }}"), [{"role": "user", "content": ""}]) == ([tiny.BOS], ())


@pytest.mark.parametrize("odd, cleaned", [
    ("ok \udc9d done", "ok \ufffd done"),
    ("\ud83d", "\ufffd"),
    ("a\ud83db", "a\ufffdb"),
    ("\ud83d\ude42", "🙂"),
    ("nul\0here", "nul\0here"),
    ("שלום 🙂", "שלום 🙂"),
])
def test_halves_of_characters_are_replaced_and_the_rest_kept_a67(odd, cleaned):
    assert TOK.decode(encode(TOK, odd)[0]) == cleaned
    assert cleaned in text_of(TOK, [{"role": "user", "content": odd}])[0]


def test_ten_thousand_letters_are_only_a_long_prompt_a67():
    assert len(encode(TOK, "a" * 10_000)[0]) == 10_000


# --- messages (A70, A71)


def test_messages_go_through_the_chat_template():
    text, notes = text_of(TOK, [SYSTEM, USER])
    assert text == "<bos>system\nBe brief.<eos>\n<bos>user\nhello<eos>\n<bos>assistant\n" and notes == ()
    assert encode(TOK, [SYSTEM, USER])[0] == TOK.apply_chat_template([SYSTEM, USER], add_generation_prompt=True)


def test_template_options_reach_the_template():
    tokenizer = with_template("{{ messages[0]['content'] }}{{ style }}")
    assert text_of(tokenizer, [USER], template_options={"style": "!"})[0] == "hello!"


@pytest.mark.parametrize("template", [NO_SYSTEM + tiny.CHAT_TEMPLATE, DROPS_SYSTEM])
def test_a_template_without_a_system_role_gets_the_text_in_the_first_user_turn_a71(template):
    text, notes = text_of(with_template(template), [SYSTEM, USER])
    assert text == "<bos>user\nBe brief.\n\nhello<eos>\n<bos>assistant\n" and notes == (SYSTEM_FOLDED,)
    assert "user\nBe brief.<eos>" in text_of(with_template(template), [SYSTEM])[0]
    assert text_of(with_template(template), [USER])[1] == ()


def test_two_user_turns_in_a_row_are_joined_when_roles_must_alternate_a71():
    tokenizer = with_template(ALTERNATING + tiny.CHAT_TEMPLATE)
    text, notes = text_of(tokenizer, [USER, USER, ANSWER, USER])
    assert text.startswith("<bos>user\nhello\n\nhello<eos>\n<bos>assistant\nhi") and notes == (MERGED,)
    assert text_of(tokenizer, [SYSTEM, USER, USER])[1] == (SYSTEM_FOLDED, MERGED)
    assert text_of(TOK, [USER, USER]) == ("<bos>user\nhello<eos>\n" * 2 + "<bos>assistant\n", ())


def test_what_no_change_makes_acceptable_is_one_line_with_the_templates_reason_a71():
    with pytest.raises(ValueError, match="refuses these messages: Conversation roles must alternate") as caught:
        encode(with_template(ALTERNATING + tiny.CHAT_TEMPLATE), [ANSWER, USER])
    assert "\n" not in str(caught.value)


def test_the_callers_messages_are_left_as_they_were_a71():
    messages = [dict(SYSTEM), dict(USER), dict(USER)]
    encode(with_template(ALTERNATING + tiny.CHAT_TEMPLATE), messages)
    assert messages == [SYSTEM, USER, USER]


def test_no_template_is_plain_text_with_a_note_a70():
    tokenizer = with_template(None)
    assert text_of(tokenizer, [USER]) == ("hello", (PLAIN_TEXT,))
    assert text_of(tokenizer, [SYSTEM, USER, ANSWER, USER])[0] == (
        "Be brief.\n\nUser: hello\n\nAssistant: hi\n\nUser: hello\n\nAssistant:")


def test_a_template_in_a_jinja_file_of_its_own_is_used_a70(tmp_path):
    from mlx_spec.pairs import load

    folder = tiny.write_folder(tmp_path / "m", chat_template=None)
    assert encode(load(folder).tokenizer, [USER])[1] == (PLAIN_TEXT,)
    (folder / "chat_template.jinja").write_text("<bos>{{ messages[0]['content'] }}!")
    assert text_of(load(folder).tokenizer, [USER]) == ("<bos>hello!", ())


@pytest.mark.parametrize("message, said", [
    ({"role": "user"}, "exactly the keys"),
    ({"role": "user", "content": "x", "name": "y"}, "exactly the keys"),
    ({"role": "bot", "content": "x"}, "role must be one of"),
    ({"role": "user", "content": None}, "content must be text"),
    ("hello", "exactly the keys"),
])
def test_a_malformed_message_is_one_line_that_says_which(message, said):
    with pytest.raises(ValueError, match=said) as caught:
        encode(TOK, [USER, message])
    assert "message 1" in str(caught.value) and "\n" not in str(caught.value)


def test_the_token_after_a_turn_is_found_in_the_template_a32():
    assert prompts.turn_end(TOK) == tiny.EOS
    assert prompts.turn_end(with_template(None)) is None
    assert prompts.turn_end(with_template("{% for m in messages %}{{ m['content'] }} {% endfor %}")) is None
    ordinary = tiny.hf_tokenizer(chat_template="{% for m in messages %}{{ m['content'] }}<x>{% endfor %}")
    ordinary.add_tokens([AddedToken("<x>", special=False)])
    assert prompts.turn_end(TokenizerWrapper(ordinary)) is None
    assert prompts.turn_end(with_template(NO_SYSTEM + "{{ raise_exception('no') }}")) is None
