"""What storage forgets: never what is served, named, resumed from, or among the newest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kestrl.storage import open_store
from kestrl.storage.episodes import ObjectEpisodeStore
from kestrl_learner.run import LearnerRun
from kestrl_learner.store.retention import delete_adapters, delete_episodes, expendable

DIGESTS = st.sampled_from(["aaaaaaaaaaaa", "bbbbbbbbbbbb"])
VERSIONS = st.sets(st.tuples(st.integers(0, 12), DIGESTS))


@given(known=VERSIONS, needed=VERSIONS, steps=st.sets(st.integers(0, 12)), keep=st.integers(1, 5))
def test_only_what_nothing_needs_may_go(
    known: set[tuple[int, str]], needed: set[tuple[int, str]], steps: set[int], keep: int
) -> None:
    folders = {f"adapters/{step:06d}-{digest}": (step, digest) for step, digest in known}
    names = [f"job.with.dots.{step}.{digest}" for step, digest in needed]
    gone = expendable(list(folders), keep=keep, names=names, steps=steps)
    newest = sorted(known)[-keep:]
    for folder, version in folders.items():
        kept = version in newest or version in needed or version[0] in steps
        assert (folder not in gone) == kept


def test_the_manifest_goes_first(tmp_path: Path, monkeypatch: Any) -> None:
    store = open_store(str(tmp_path))
    for step in range(3):
        for name in ("adapter_config.json", "adapter_model.safetensors", "manifest.json"):
            store.put(f"adapters/{step:06d}-aaaaaaaaaaaa/{name}", b"x")
    store.put("adapters/notes.txt", b"a person's own")
    removed: list[str] = []
    delete = store.delete
    monkeypatch.setattr(store, "delete", lambda path: (removed.append(path), delete(path)))
    assert delete_adapters(store, keep=1, names=["job.1.aaaaaaaaaaaa"], steps=()) == ["adapters/000000-aaaaaaaaaaaa"]
    assert removed[0].endswith("/manifest.json")
    assert len(removed) == 3
    assert len(store.list("adapters")) == 7


def test_episodes_of_old_steps_go(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for step in range(4):
        store.put(f"episodes/train/{step:06d}.pb", b"x")
    store.put("episodes/eval/000000.pb", b"x")
    store.put("episodes/train/step=000005.parquet", b"x")
    assert delete_episodes(ObjectEpisodeStore(store), keep=3) == [1, 2]
    assert store.list("episodes") == [
        "episodes/eval/000000.pb",
        "episodes/train/000002.pb",
        "episodes/train/000003.pb",
        "episodes/train/step=000005.parquet",
    ]


async def test_a_run_forgets_while_it_trains_and_still_resumes(staged: Any, tmp_path: Path) -> None:
    keeping = {"keep_adapters": 1, "keep_episodes": 2, "keep_checkpoints": 1}
    async with staged() as stage:
        await LearnerRun(stage.but(max_steps=4, **keeping)).main()
        adapters = sorted(path.name[:6] for path in (tmp_path / "store" / "adapters").iterdir() if any(path.iterdir()))
        assert "000004" in adapters
        assert "000000" not in adapters
        assert sorted(path.name for path in (tmp_path / "store" / "episodes" / "train").iterdir()) == [
            "step=000003.parquet",
            "step=000004.parquet",
        ]
        await LearnerRun(stage.but(max_steps=6, **keeping)).main()
        assert stage.summary["status"] == "succeeded"
        assert stage.summary["steps"] == 6
