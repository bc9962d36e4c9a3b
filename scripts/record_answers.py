"""Records what an installed engine answers to the requests of its dialect: `tests/data/engine_answers/NAME.json`.

    kestrl engine install vllm==0.32.0
    python scripts/record_answers.py vllm==0.32.0 [--engines FOLDER] [--check]

`--check` also runs the conformance suite on the engine that is started.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kestrl._app.engines.builds import wanted_engine
from kestrl._app.engines.checking import PROMPT, StartedEngine, started_engine
from kestrl._app.engines.installing import find_installed
from kestrl._app.engines.random_adapter import RANK, write_random_adapter
from kestrl._app.engines.store import VARIABLE, engines_folder
from kestrl.data.locate import locate_model
from kestrl.engines import POLICY_HEADER, EngineDialect, Generate, Request
from kestrl.engines.registry import DIALECTS
from kestrl.episode import BASE_MODEL_NAME
from kestrl.testing.engines import check_engine

ANSWERS = Path(__file__).parents[1] / "tests" / "data" / "engine_answers"
ADAPTER, UNKNOWN = "answers.1", "answers.never"
SEED = 7
SECONDS = 120.0
METRICS = re.compile(r"^(process_start_time|vllm:(kv_cache|num_)|sglang:(token_usage|num_))")


def turn(policy: str, **changes: Any) -> Generate:
    fields: dict[str, Any] = {
        "id": f"answers/{policy}", "policy": policy, "prompt_ids": PROMPT, "temperature": 1.0, "max_tokens": 3,
        "seed": SEED, "stop_token_ids": (),
    }  # fmt: skip
    return Generate(**fields | changes)


def requests_of(dialect: EngineDialect, adapter: str, high_rank: str, missing: str) -> Iterator[tuple[str, Request]]:
    """The requests to record, in the order in which they are sent."""
    yield "version", dialect.version
    yield "no adapters", dialect.adapters
    yield "generate, base", dialect.generate(turn(BASE_MODEL_NAME))
    yield "generate, greedy", dialect.generate(turn(BASE_MODEL_NAME, temperature=0.0))
    yield "score, base", dialect.score(BASE_MODEL_NAME, PROMPT[:5])
    yield "generate, unknown adapter", dialect.generate(turn(UNKNOWN))
    yield "generate, prompt too long", dialect.generate(turn(BASE_MODEL_NAME, prompt_ids=PROMPT * 40))
    yield "load", dialect.load(ADAPTER, adapter)
    yield "load again", dialect.load(ADAPTER, adapter)
    yield "load, no folder", dialect.load(UNKNOWN, missing)
    yield "load, rank too high", dialect.load(UNKNOWN, high_rank)
    yield "adapters", dialect.adapters
    yield "generate, adapter", dialect.generate(turn(ADAPTER))
    yield "score, adapter", dialect.score(ADAPTER, PROMPT[:5])
    yield "unload", dialect.unload(ADAPTER)
    yield "unload again", dialect.unload(ADAPTER)
    yield "generate, unloaded", dialect.generate(turn(ADAPTER))
    yield "metrics", dialect.metrics


def ask(started: StartedEngine, request: Request) -> dict[str, Any]:
    headers = {"content-type": "application/json", "authorization": f"Bearer {started.key}"}
    asked = urllib.request.Request(  # noqa: S310 - of this machine
        started.url + request.path, request.body or None, headers, method=request.method
    )
    try:
        with urllib.request.urlopen(asked, timeout=SECONDS) as answer:  # noqa: S310
            return {"status": answer.status, "policy": answer.headers.get(POLICY_HEADER), "body": answer.read()}
    except urllib.error.HTTPError as refusal:
        with refusal:
            return {"status": refusal.code, "policy": refusal.headers.get(POLICY_HEADER), "body": refusal.read()}


def printable(name: str, body: bytes, paths: Mapping[str, str]) -> str:
    """The body without this machine's paths, and of metrics those of load and start."""
    text = body.decode()
    for path, placeholder in paths.items():
        text = text.replace(path, placeholder)
    if name != "metrics":
        return text
    return "".join(line for line in text.splitlines(keepends=True) if METRICS.search(line))


def record(engine: str, folder: Path, *, check: bool) -> Path:
    chosen = find_installed(folder, wanted_engine(engine, "cpu"))
    dialect = DIALECTS[chosen.record.engine]
    model = locate_model("demo://tiny", base=Path.cwd(), field="--model")
    work = Path(tempfile.mkdtemp(prefix="kestrl-answers-"))
    config = json.loads((Path(model) / "config.json").read_bytes())
    write_random_adapter(config, work / "high", seed=2, rank=64 * RANK)
    with started_engine(chosen, model, work) as started:
        answers: dict[str, dict[str, Any]] = {
            name: {"method": request.method, "path": request.path, **ask(started, request)}
            for name, request in requests_of(dialect, started.adapter, str(work / "high"), str(work / "missing"))
        }
        if check:
            check_engine(
                dialect, started.url, base=BASE_MODEL_NAME, adapter=started.adapter, prompt_ids=PROMPT, key=started.key
            )
    for name, answer in answers.items():
        answer["body"] = printable(name, answer["body"], {str(work): "/work", model: "/model"})
    ANSWERS.mkdir(parents=True, exist_ok=True)
    path = ANSWERS / f"{chosen.record.engine}-{chosen.record.version}.json"
    path.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    shutil.rmtree(work)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", help="such as vllm==0.32.0")
    parser.add_argument("--engines", type=Path, help="folder of installed engines")
    parser.add_argument("--check", action="store_true", help="also run the conformance suite")
    options = parser.parse_args()
    folder = engines_folder() if options.engines is None else engines_folder({VARIABLE: str(options.engines)})
    print(record(options.engine, folder, check=options.check))


if __name__ == "__main__":
    main()
