"""`python -m eval [--model …] [--drafter …] [--suites a,b] [--suites-from FOLDER] [key=value …]`
`python -m eval compare A B` · `python -m eval schedule …` · `python -m eval draft-cost …`"""

import argparse
import os
import sys

from infra.cli import main


def run(argv: list[str]) -> int | None:
    if argv[:1] == ["compare"]:
        return _compare(argv[1:])
    if argv[:1] == ["schedule"]:
        from eval.schedule import run as schedule

        return schedule(argv[1:])
    if argv[:1] == ["draft-cost"]:
        from eval.draft_cost import run as draft_cost

        return draft_cost(argv[1:])
    p = argparse.ArgumentParser(prog="python -m eval", description="τ, speed-up and the lossless check of a drafter")
    p.add_argument("--model", help="target: a name in features/targets or a TOML file")
    p.add_argument("--drafter", help="run folder or checkpoint folder; default: the newest run of the target")
    p.add_argument("--before", help="checkpoint of the untrained drafter, to compare with")
    p.add_argument("--suites", help="comma-separated: names, heldout, files of prompts (.jsonl)")
    p.add_argument("--suites-from", metavar="FOLDER", help="read the suites' files here instead of from the hub")
    p.add_argument("--limit", type=int, help="prompts per suite")
    p.add_argument("--store", help="feature store of the suite heldout")
    p.add_argument("--engine", help="also measure a serving engine: vllm, or http://host:port of vLLM or SGLang")
    p.add_argument("--out", help="folder for report.json")
    p.add_argument("overrides", nargs="*", metavar="key=value", help="any field of eval.config.EvalConfig")
    args = p.parse_intermixed_args(argv)  # options may follow overrides

    from eval.config import EvalConfig
    from infra.config import apply_overrides, validate

    given = {
        "model": args.model, "drafter": args.drafter, "before": args.before, "data": args.suites_from,
        "limit": args.limit, "store": args.store, "out": args.out,
        "engine": args.engine,
        "suites": tuple(filter(None, args.suites.split(","))) if args.suites else None,
    }  # fmt: skip
    data = {key: value for key, value in given.items() if value is not None}
    cfg = validate(EvalConfig, apply_overrides(data, args.overrides), "the evaluation")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    from eval.run import evaluate, output_folder, summary
    from eval.session import checkpoint_folder

    report = evaluate(cfg)
    print(summary(report))
    print(f"\nwritten to {output_folder(cfg, checkpoint_folder(report['drafter']['path'])) / 'report.json'}")
    failed = [name for name, s in report["suites"].items() if s["lossless"]["checked"] != s["lossless"]["identical"]]
    if failed:
        print(f"flashdraft: the text changed on {', '.join(failed)}; see lossless.divergences there", file=sys.stderr)
        return 1
    return 0


def _compare(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m eval compare", description="which of two evaluated drafters is better")
    p.add_argument("a", help="run folder or report.json")
    p.add_argument("b", help="run folder or report.json")
    args = p.parse_args(argv)

    from eval.compare import compare, load, text

    a, b = load(args.a), load(args.b)
    print(text(compare(a, b), args.a, args.b))
    return 0


if __name__ == "__main__":
    main(lambda: run(sys.argv[1:]))
