"""The prompts of the default corpus."""

from pipeline.prompts import TEMPLATES, generate_prompts


def test_enough_templates_of_every_kind():
    assert len(TEMPLATES) >= 40 and len({t.name for t in TEMPLATES}) == len(TEMPLATES)
    kinds = {"word-problem", "programming", "question", "rewriting", "list", "story"}
    assert {t.category for t in TEMPLATES} == kinds
    assert sum(t.heldout for t in TEMPLATES) >= 5


def test_train_and_heldout_are_disjoint():
    prompts = list(generate_prompts(800, 100, seed=3))
    assert len({p.text for p in prompts}) == 900
    train = {p.template for p in prompts if p.split == "train"}
    heldout = {p.template for p in prompts if p.split == "heldout"}
    never_trained = {t.name for t in TEMPLATES if t.heldout}
    assert not train & never_trained
    assert heldout & never_trained and heldout - never_trained
    assert not any("{" in p.text and "}" in p.text and "def" not in p.text for p in prompts)


def test_a_larger_corpus_begins_with_the_smaller():
    small, large = list(generate_prompts(50, 20, 1)), list(generate_prompts(90, 20, 1))
    assert large[:70] == small
    assert list(generate_prompts(50, 20, 2)) != small
