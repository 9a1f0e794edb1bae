"""`python -m pipeline --model smollm2-135m --corpus demo [key=value ...]`: from a corpus to a feature store."""

import argparse

from infra.cli import main


def run() -> int:
    parser = argparse.ArgumentParser(prog="python -m pipeline", description=__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m", help="a target of features/targets or the path of a TOML file"
    )
    parser.add_argument("--corpus", default="demo", help="a corpus of pipeline/corpora or the path of a TOML file")
    parser.add_argument("--run", default="", help="MLflow: the drafter's run that these features are for")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="regenerate.max_new_tokens=128 target.max_length=512 dry=true ...",
    )
    args = parser.parse_args()

    from pipeline.config import resolve

    cfg = resolve(args.model, args.corpus, args.overrides)
    from pipeline.run import build_features
    from pipeline.summary import text

    result = build_features(cfg)
    print(text(result))
    if not cfg.dry:
        from pipeline.track import log_features

        log_features(cfg, result, args.run)
    return 0


if __name__ == "__main__":
    main(run)
