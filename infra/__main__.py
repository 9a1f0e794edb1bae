"""`python -m infra doctor | ui | demo | bench | submit | sizing`."""

import argparse
import sys

from infra.cli import main


def run(argv: list[str]) -> int | None:
    if argv[:1] == ["submit"]:
        from infra.submit.cli import submit

        return submit(argv[1:])
    p = argparse.ArgumentParser(prog="python -m infra")
    sub = p.add_subparsers(dest="verb", required=True)
    sub.add_parser("doctor", help="check this machine")
    ui = sub.add_parser("ui", help="MLflow on loopback")
    ui.add_argument("--port", type=int, default=5000)
    demo = sub.add_parser("demo", help="the whole path on the embedded target")
    demo.add_argument("overrides", nargs="*", help="key=value for the training recipe")
    bench = sub.add_parser("bench", help="benchmarks into runs/bench/<part>.json")
    bench.add_argument("part", choices=["", *BENCHES], metavar="|".join(BENCHES))
    bench.add_argument("args", nargs=argparse.REMAINDER)  # flags too, which are the benchmark's
    sub.add_parser("submit", help="run a stage on Ray, Kubernetes, Slurm or here")
    sub.add_parser("sizing", help="GPUs, nodes, TB, hours and cost per 100 M tokens, as Markdown")
    args = p.parse_args(argv)
    match args.verb:
        case "doctor":
            from infra.doctor import doctor

            return doctor()
        case "sizing":
            from infra.sizing import sizing

            print(sizing())
        case "ui":
            from infra.ui import ui as serve

            return serve(args.port)
        case "demo":
            from infra.demo import demo as run_demo

            return run_demo(args.overrides)
        case "bench":
            from infra.bench import bench as run_bench

            return run_bench(args.part, args.args)


# part -> module with a `__main__`; called as a command line, since infra imports none of them
BENCHES = {
    "features": "features.bench",
    "pipeline": "pipeline.bench",
    "train-step": "trainer.drafter.bench",
    "trainer": "trainer.bench",
    "kernels": "kernels.bench",
    "replay": "eval.bench",
}

if __name__ == "__main__":
    main(lambda: run(sys.argv[1:]))
