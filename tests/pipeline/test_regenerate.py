"""Answers that a killed run had kept are kept, and the rest comes out as if nothing had happened."""

import os

import pytest
from ray_kit import configured, write_corpus

from pipeline import regenerate as module
from pipeline.corpus import read_corpus
from pipeline.front import TargetFront
from pipeline.regenerate import regenerate
from pipeline.render import Renderer
from pipeline.responses import Responses


class Killed(BaseException):
    """Stands for the end of the driver's process."""


def chats(folder, rows=40):
    """Two turns each, so that the second answers follow the target's own first ones."""
    data = [
        {"messages": [{"role": r, "content": f"{r} {i} {'so ' * (i % 5)}"} for r in ("user", "assistant") * 2]}
        for i in range(rows)
    ]
    return write_corpus(folder, "chats", data, "[regenerate]\nmax_new_tokens = 6\nbatch_size = 8\n")


@pytest.fixture
def answered(tmp_path, tiny, monkeypatch):
    """A function that regenerates in this process, one task after the other as a single actor has them, and gives the
    dialogues; it dies before task `die_at` where that is given. `answered.tasks` are the prompts of each task begun."""
    corpus = chats(tmp_path)

    def run(name, die_at=None):
        cfg = configured(tmp_path, corpus, name=name)
        front = TargetFront(cfg.target)
        renderer = Renderer(cfg.target, front.tokenizer, front.chat_template(), front.stop_ids)
        run.tasks = []

        def one_after_another(missing, work, arguments, _ray):
            writer = work(**arguments, threads=1, cwd=os.getcwd())
            while rows := missing():
                for row in rows:
                    if len(run.tasks) == die_at:
                        raise Killed
                    run.tasks.append(row["key"][0].as_py())
                    yield writer.run(row)

        monkeypatch.setattr(module, "run_until_done", one_after_another)
        dialogues, rejects, figures = regenerate(cfg, front, renderer, list(read_corpus(cfg)))
        assert not rejects and figures["answers"] == 80
        return {d.conversation.key: (d.messages, d.answers) for d in dialogues}

    run.parts = lambda name: sorted((tmp_path / f"data-{name}").rglob("part-*.parquet"))
    return run


@pytest.mark.parametrize("die_at", [0, 1, 2, 3])
def test_a_killed_run_goes_on_where_it_was(answered, die_at):
    undisturbed, tasks = answered("calm"), answered.tasks
    assert len(tasks) == 4, "two tasks for each of the two turns"
    with pytest.raises(Killed):
        answered("storm", die_at)
    begun, kept = answered.tasks, answered.parts("storm")
    assert begun == tasks[:die_at] and len(kept) == die_at
    times = [p.stat().st_mtime_ns for p in kept]
    assert answered("storm") == undisturbed
    assert answered.tasks == tasks[die_at:], "what was kept is not asked again, the rest in the same batches"
    assert [p.stat().st_mtime_ns for p in kept] == times and len(answered.parts("storm")) == 4


def test_a_half_written_part_counts_as_nothing(answered, monkeypatch):
    """The kill falls into the writing of the second part: what lies beside it is never read."""
    undisturbed, real, writes = answered("calm"), module.Responses.add, []

    def torn(self, rows):
        rows = list(rows)
        writes.append(rows)
        if len(writes) == 2:
            real(self, rows)
            part = max(self.folder.glob("part-*.parquet"), key=lambda p: p.stat().st_mtime_ns)
            part.rename(self.folder / f".{part.stem}.77")
            (self.folder / f".{part.stem}.77").write_bytes(b"PAR1 half of it")
            raise Killed
        real(self, rows)

    monkeypatch.setattr(Responses, "add", torn)
    with pytest.raises(Killed):
        answered("storm")
    monkeypatch.setattr(Responses, "add", real)
    assert len(answered.parts("storm")) == 1
    assert answered("storm") == undisturbed and len(answered.tasks) == 3
