"""Rendering and loss masks with templates of the kinds that people's targets have."""

import numpy as np
import pytest

from pipeline.render import Answer, BadSample, Renderer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TAGGED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Qwen3's: an empty think block before the last answer only, so that earlier turns change when later ones follow
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
    "{% elif m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.name }}</tool_call>{% endif %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TRIMMING = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('no system turn, please') }}{% endif %}" + CHATML


@pytest.fixture
def renderer(tiny):
    def make(template=CHATML, max_length=256, **args):
        cfg = tiny.config.model_copy(update={"max_length": max_length, "chat_template_args": args})
        return Renderer(cfg, tiny.tokenizer, template, tiny.stop_ids)

    return make


def chat(*texts, **last):
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": t} for i, t in enumerate(texts)]
    turns[-1] |= last
    return tuple(turns)


def split(tiny, rendered):
    """(whole text, supervised pieces)."""
    ids, mask = rendered.token_ids_S, rendered.loss_mask_S
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    pieces = [tiny.tokenizer.decode(ids[a:b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    return tiny.tokenizer.decode(ids), pieces


@pytest.mark.parametrize("template", [CHATML, TAGGED])
def test_only_answers_and_their_end_are_supervised(tiny, renderer, template):
    rendered = renderer(template).conversation(chat("Hi", "Hello!", "More", "Bye"))
    text, pieces = split(tiny, rendered)
    assert text == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>\n"
        "<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\nBye<|im_end|>\n"
    )
    assert pieces == ["Hello!<|im_end|>", "Bye<|im_end|>"]
    assert rendered.prompt_length == len("user\nHi") + 2 + 1 + 1 + len("assistant\n")
    assert rendered.token_ids_S.dtype == np.int32 and rendered.loss_mask_S.dtype == np.uint8


def test_inserted_empty_think_block_is_not_supervised(tiny, renderer):
    _, pieces = split(tiny, renderer(THINKING).conversation(chat("Hi", "Hello!")))
    assert pieces == ["Hello!<|im_end|>"]
    text, pieces = split(tiny, renderer(THINKING, enable_thinking=False).conversation(chat("Hi", "Hello!")))
    assert pieces == ["Hello!<|im_end|>"] and "<think>\n\n</think>\n\nHello!" in text


def test_given_reasoning_is_supervised_with_its_markers(tiny, renderer):
    _, pieces = split(tiny, renderer(THINKING).conversation(chat("Hi", "Hello!", reasoning_content="polite")))
    assert pieces == ["<think>\npolite\n</think>\n\nHello!<|im_end|>"]


def test_tool_calls_are_supervised(tiny, renderer):
    turns = chat("Hi", "", tool_calls=[{"function": {"name": "f"}}])
    assert split(tiny, renderer(THINKING).conversation(turns))[1] == ["<tool_call>f</tool_call><|im_end|>"]


def test_templates_that_rewrite_earlier_turns_are_refused_and_rows_per_turn_work(tiny, renderer):
    turns = chat("Hi", "Hello!", "More", "Bye")
    with pytest.raises(BadSample, match=r"turn 1 changes when later turns follow.*rows = 'turn'"):
        renderer(THINKING).conversation(turns)
    rows = renderer(THINKING).turns(turns)
    assert [split(tiny, r)[1] for r in rows] == [["Hello!<|im_end|>"], ["Bye<|im_end|>"]]
    assert split(tiny, rows[1])[0].startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello!<|im_end|>")


def test_emitted_tokens_are_the_document(tiny, renderer):
    stop = next(iter(tiny.stop_ids))
    ids = [72, 200, 105, stop]  # not what tokenising any text would give
    text = tiny.tokenizer.decode(ids, skip_special_tokens=True)
    turns = chat("Hi", text)
    rendered = renderer().conversation(turns, answers={1: Answer(text, ids, True)})
    assert rendered.token_ids_S[-4:].tolist() == ids and rendered.loss_mask_S.tolist()[-5:] == [0, 1, 1, 1, 1]
    prompt = renderer().prompt_ids(turns[:1])
    assert rendered.token_ids_S[: rendered.prompt_length].tolist() == prompt
    cut = renderer().conversation(turns, answers={1: Answer(text, ids[:-1], False)})
    assert cut.token_ids_S.tolist() == prompt + ids[:-1]


def test_earlier_answers_keep_the_emitted_tokens(tiny, renderer):
    stop = next(iter(tiny.stop_ids))
    turns = chat("Hi", " one", "More", "two")
    ids = {1: [*tiny.tokenizer.encode(" one"), stop], 3: [*tiny.tokenizer.encode("two"), stop]}
    answers = {i: Answer(turns[i]["content"], t, True) for i, t in ids.items()}
    assert split(tiny, renderer().conversation(turns, answers=answers))[1] == [" one<|im_end|>", "two<|im_end|>"]
    # a template that trims shows later turns another text: that is then what is supervised
    assert split(tiny, renderer(TRIMMING).conversation(turns, answers=answers))[1] == ["one<|im_end|>", "two<|im_end|>"]
    answers[1] = Answer(" one", ids[1][:-1], False)
    assert split(tiny, renderer().conversation(turns, answers=answers))[1] == [" one", "two<|im_end|>"]
    answers = {1: Answer(" one", None, False), 3: Answer("two", None, True)}
    assert split(tiny, renderer().conversation(turns, answers=answers))[1] == ["one", "two<|im_end|>"]


def test_truncation_keeps_the_mask_true(tiny, renderer):
    whole = renderer().conversation(chat("Hi", "Hello there, how are you?"))
    cut = renderer(max_length=40).conversation(chat("Hi", "Hello there, how are you?"))
    assert len(cut.token_ids_S) == 40
    assert (cut.token_ids_S == whole.token_ids_S[:40]).all() and (cut.loss_mask_S == whole.loss_mask_S[:40]).all()
    with pytest.raises(BadSample, match="within max_length 20 of its"):
        renderer(max_length=20).conversation(chat("Hi", "Hello there, how are you?"))


@pytest.mark.parametrize(
    ("turns", "reason", "template"),
    [
        (chat("Hi"), "no assistant turn", CHATML),
        (chat("Hi", ""), "turn 1 of the assistant is empty", CHATML),
        (chat("Hi", "a"), "minimum", CHATML.replace("{{ m.content }}<|im_end|>", "{{ m.content }}")),
        (({"role": "system", "content": "s"}, *chat("Hi", "a")), "no system turn, please", STRICT),
        (
            chat("Hi", "Hello"),
            "every token is supervised",
            "{% if not add_generation_prompt %}{{ messages[1].content }}{% endif %}",
        ),
    ],
)
def test_refusals_name_their_reason(renderer, turns, reason, template):
    with pytest.raises(BadSample, match=reason):
        renderer(template).conversation(turns)


def test_odd_content_comes_through(tiny, renderer):
    text = "emoji 😀, \x00\x07 control, \u2028, e\u0301"
    whole, pieces = split(tiny, renderer().conversation(chat(text, text)))
    assert pieces == [text + "<|im_end|>"] and whole.count(text) == 2


def test_hundred_turns(tiny, renderer):
    turns = chat(*[f"turn {i}" for i in range(100)])
    _, pieces = split(tiny, renderer(max_length=4096).conversation(turns))
    assert pieces == [f"turn {i}<|im_end|>" for i in range(1, 100, 2)]


def test_fifty_thousand_tokens_become_a_cut_row_or_a_named_reject(tiny, renderer):
    answer = renderer(max_length=3072).conversation(chat("Hi", "because " * 6_250))
    assert len(answer.token_ids_S) == 3072 and answer.loss_mask_S[answer.prompt_length :].all()
    assert not answer.loss_mask_S[: answer.prompt_length].any()
    with pytest.raises(BadSample, match=r"within max_length 3072 of its 50\d{3} tokens"):
        renderer(max_length=3072).conversation(chat("because " * 6_250, "Hello"))
