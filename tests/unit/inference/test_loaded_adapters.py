"""Loading, proving and retiring, through the agent's front door."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engine import Completion, Fault, Prompt, score

from kestrl._shared.credentials import Secret
from kestrl._shared.rpc import call
from kestrl.api.common.v1 import common_pb2
from kestrl.api.inference.v1 import inference_pb2 as pb
from kestrl.episode import PolicyVersion
from kestrl.episode.codec import policy_to_proto
from kestrl.errors import EngineFailure, FailureError, KestrlError
from kestrl.storage import Probe
from kestrl.storage.adapters import MANIFEST, WEIGHTS

IDS = (5, 6, 7, 8, 9)


async def refused(stage: Any, version: Any) -> FailureError:
    """What loading a version fails with; it is held nowhere afterwards."""
    with pytest.raises(FailureError) as caught:
        await stage.load(version)
    assert version.policy.step not in await stage.proved()
    assert version.name not in stage.engine.adapters
    assert stage.folders() == [], "a refused version leaves nothing on disk"
    assert caught.value.component in {"inference-0", "engine-0"}
    return caught.value


async def test_a_version_is_fetched_loaded_and_proved(stage: Any) -> None:
    version = stage.publish(1)
    answer = await stage.load(version)
    assert answer.probe_gap == 0.0
    assert min(answer.fetch_seconds, answer.load_seconds, answer.prove_seconds) > 0
    assert await stage.proved() == {1: True}
    assert stage.engine.adapters == {version.name: str(stage.adapters / version.name)}
    assert sorted(path.name for path in (stage.adapters / version.name).iterdir()) == ["adapter_config.json", WEIGHTS]


async def test_the_build_that_answered_a_proof_and_its_witness_are_reported(stage: Any) -> None:
    assert not (await stage.seen()).HasField("build")
    await stage.load(stage.publish(1))
    build = (await stage.seen()).build
    assert (build.engine, build.version, build.witness) == ("vllm", stage.engine.version, "engine")


async def test_the_probe_is_scored_anew_at_the_policys_own_distribution(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    prompt = stage.engine.prompts[0]
    assert (prompt.model, tuple(prompt.token_ids)) == (version.name, IDS)
    assert prompt.sampling["temperature"] == 1.0
    assert prompt.sampling["skip_reading_prefix_cache"] is True
    assert prompt.sampling["max_tokens"] == 1


async def test_a_proof_samples_one_token_with_a_seed(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    _, prompt = stage.engine.prompts
    assert (prompt.model, tuple(prompt.token_ids)) == (version.name, IDS)
    assert (prompt.sampling["max_tokens"], prompt.sampling["seed"], prompt.sampling["logprobs"]) == (1, 7, 0)


NAMELESS = json.dumps(
    {
        "choices": [
            {"token_ids": [5], "finish_reason": "length", "logprobs": {"content": [{"token_id": 5, "logprob": -1}]}}
        ]
    }
)


@pytest.mark.parametrize(
    ("answer", "field"),
    [
        (Fault(status=200, body=NAMELESS), "missing required field `model`"),
        (Fault(status=200, body="{}"), "missing required field"),
        (Fault(status=200, body="<html>"), "vllm 0.23.0 answers"),
        (Completion(token_ids=[5], model="base"), "it names the policy 'base' where"),
        (Completion(token_ids=[5], logprobs=[]), "with 0 log-probs"),
        (Completion(token_ids=[5], logprobs=[-9999.0]), "its log-prob is not finite"),
        (Completion(token_ids=[]), "0 tokens with 0 log-probs"),
    ],
    ids=str,
)
async def test_an_engine_that_answers_in_an_unknown_form_is_not_proved(stage: Any, answer: Any, field: str) -> None:
    """Before any episode is spent, naming engine, version and field."""

    def script(prompt: Prompt) -> Completion | Fault:
        return stage.engine.sample(prompt) if "prompt_logprobs" in prompt.sampling else answer

    stage.engine.script, stage.engine.version = script, "0.23.0"
    with pytest.raises(EngineFailure, match=r"vllm 0\.23\.0 answers a generation in a form") as raised:
        await stage.loaded.load((version := stage.publish(1)).policy, version.uri)
    assert field in str(raised.value)
    assert (raised.value.code, raised.value.retryable) == ("engine_nonsense", False)
    assert await stage.proved() == {1: False}


async def test_only_the_control_key_loads(stage: Any) -> None:
    await stage.load(stage.publish(1))
    assert stage.engine.prompts[0].headers["Authorization"] == "Bearer the control key"


async def test_loading_again_proves_again_and_loads_nothing(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    await stage.load(version)
    assert stage.engine.calls == [f"load {version.name}"]
    assert stage.engine.scored == [version.name] * 2


async def test_concurrent_callers_for_one_version_share_the_work(stage: Any) -> None:
    version = stage.publish(1)
    stage.engine.hold = asyncio.Event()
    loads = [asyncio.create_task(stage.loaded.load(version.policy, version.uri)) for _ in range(3)]
    await stage.engine.arrived.wait()  # by then all three have begun, which calls over the network need not have
    stage.engine.hold.set()
    assert len(set(map(id, await asyncio.gather(*loads)))) == 1
    assert stage.engine.calls == [f"load {version.name}"]
    assert stage.engine.scored == [version.name]


async def test_a_caller_that_gives_up_does_not_cut_a_load_in_the_middle(stage: Any) -> None:
    version = stage.publish(1)
    stage.engine.hold = asyncio.Event()
    gone = asyncio.create_task(stage.loaded.load(version.policy, version.uri))
    await stage.engine.arrived.wait()
    gone.cancel()
    await asyncio.wait([gone])
    assert gone.cancelled()
    stage.engine.hold.set()
    await stage.load(version)
    assert stage.engine.calls == [f"load {version.name}"]
    assert await stage.proved() == {1: True}


async def test_versions_are_loaded_one_after_another(stage: Any) -> None:
    versions = [stage.publish(step) for step in (1, 2, 3)]
    await asyncio.gather(*(stage.load(version) for version in versions))
    assert sorted(stage.engine.calls) == sorted(f"load {version.name}" for version in versions)
    assert await stage.proved() == {1: True, 2: True, 3: True}


async def test_the_untouched_adapter_is_proved_although_it_is_the_base(stage: Any) -> None:
    base = tuple(score("", IDS)[1:])
    version = stage.publish(0, probe=Probe(token_ids=IDS, logprobs=base, base_logprobs=base))
    stage.engine.unapplied.add(version.name)
    assert (await stage.load(version)).probe_gap == 0.0


# --- what an engine does wrong


async def test_an_adapter_that_is_not_applied_is_caught(stage: Any) -> None:
    version = stage.publish(1)
    stage.engine.unapplied.add(version.name)
    error = await refused(stage, version)
    assert (error.boundary, error.code) == ("engine", "adapter_not_applied")
    assert stage.engine.calls == [f"load {version.name}", f"unload {version.name}"]


async def test_an_engine_that_computes_something_else_is_caught(stage: Any) -> None:
    version = stage.publish(1)
    stage.engine.swapped[version.name] = "other weights"
    error = await refused(stage, version)
    assert error.code == "probe_failed"
    assert "neither" in str(error)


async def test_an_engine_that_serves_the_previous_similar_version_is_caught(stage: Any) -> None:
    before = stage.publish(1)
    await stage.load(before)
    almost = tuple(value + 1e-6 for value in score(before.policy.sha256, IDS)[1:])
    base = tuple(score("", IDS)[1:])
    version = stage.publish(2, probe=Probe(token_ids=IDS, logprobs=almost, base_logprobs=base))
    stage.engine.swapped[version.name] = before.policy.sha256
    with pytest.raises(FailureError, match=f"it answers as {re.escape(before.name)} does") as caught:
        await stage.load(version)
    assert (caught.value.boundary, caught.value.code) == ("engine", "other_version")
    assert await stage.proved() == {1: True}
    assert stage.engine.adapters.keys() == {before.name}


async def test_a_rank_above_the_engines_limit_names_the_fix(stage: Any) -> None:
    stage.engine.max_rank_error = True
    error = await refused(stage, stage.publish(1, rank=32))
    assert error.code == "rank_too_high"
    assert not error.retryable
    assert "rank 32" in str(error)
    assert "spec.inference.args.max-lora-rank" in str(error)


async def test_a_name_that_the_engine_gave_to_another_folder_is_refused(stage: Any, tmp_path: Path) -> None:
    version = stage.publish(1)
    stage.engine.adapters[version.name] = str(tmp_path)
    with pytest.raises(FailureError, match="the name is taken") as caught:
        await stage.load(version)
    assert caught.value.code == "adapter_refused"
    assert stage.engine.adapters == {version.name: str(tmp_path)}


async def test_an_adapter_that_the_engine_cannot_read_is_refused(stage: Any) -> None:
    version = stage.publish(1)
    manifest = json.loads((version.folder / MANIFEST).read_bytes())
    del manifest["files"]["adapter_config.json"]
    (version.folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    error = await refused(stage, version)
    assert (error.code, error.retryable) == ("adapter_refused", False)
    assert "No adapter found" in str(error)


# --- what storage holds wrong


async def test_a_corrupt_file_is_refused(stage: Any) -> None:
    version = stage.publish(1)
    (version.folder / WEIGHTS).write_bytes(b"weights of step 2")
    assert (await refused(stage, version)).code == "digest_mismatch"
    assert stage.engine.calls == []


async def test_a_half_uploaded_version_is_refused(stage: Any) -> None:
    version = stage.publish(1)
    (version.folder / MANIFEST).unlink()
    assert (await refused(stage, version)).code == "not_found"


async def test_a_missing_file_is_refused(stage: Any) -> None:
    version = stage.publish(1)
    (version.folder / WEIGHTS).unlink()
    assert (await refused(stage, version)).code == "not_found"


async def test_a_refused_version_can_be_loaded_when_it_is_fixed(stage: Any) -> None:
    version = stage.publish(1)
    whole = (version.folder / WEIGHTS).read_bytes()
    (version.folder / WEIGHTS).write_bytes(b"half")
    await refused(stage, version)
    (version.folder / WEIGHTS).write_bytes(whole)
    await stage.load(version)
    assert await stage.proved() == {1: True}


async def test_another_version_than_the_one_asked_for_is_refused(stage: Any) -> None:
    one, two = stage.publish(1), stage.publish(2)
    request = pb.LoadPolicyRequest(policy=policy_to_proto(one.policy), uri=two.uri)
    with pytest.raises(FailureError) as caught:
        await call(
            stage.stub.LoadPolicy,
            request,
            pb.LoadPolicyResponse,
            timeout=30,
            peer="agent",
            token=Secret.LEARNER_TO_INFERENCE.here(),
        )
    assert caught.value.code == "wrong_policy"
    assert stage.folders() == []


BASE = (-1.0, -1.0, -1.0, -1.0)


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"sha256": "0" * 64}, "manifest_malformed"),
        ({"probe": Probe(token_ids=(5,), logprobs=(), base_logprobs=())}, "manifest_malformed"),
        ({"probe": Probe(token_ids=(), logprobs=(), base_logprobs=())}, "manifest_malformed"),
        ({"probe": Probe(token_ids=IDS, logprobs=BASE[1:], base_logprobs=BASE)}, "manifest_malformed"),
        ({"probe": Probe(token_ids=IDS, logprobs=BASE, base_logprobs=())}, "manifest_malformed"),
    ],
    ids=["not its own digest", "one token", "empty", "too short", "no base"],
)
async def test_a_manifest_that_proves_nothing_is_refused(stage: Any, changes: Any, code: str) -> None:
    assert (await refused(stage, stage.publish(1, **changes))).code == code


async def test_a_probe_that_is_not_finite_is_refused(stage: Any) -> None:
    # Compared with anything, NaN is neither above nor below a bound.
    version = stage.publish(1)
    manifest = json.loads((version.folder / MANIFEST).read_bytes())
    manifest["probe"]["logprobs"][-1] = float("nan")
    (version.folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    error = await refused(stage, version)
    assert error.code == "manifest_malformed"
    assert "finite number" in str(error)


async def test_a_disk_that_cannot_be_written_is_a_typed_failure(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    version = stage.publish(1)
    monkeypatch.setattr("kestrl.storage.files._write", full)
    error = await refused(stage, version)
    assert (error.boundary, error.code) == ("infrastructure", "place_unusable")
    assert "no space left" in str(error)


async def test_a_request_without_a_version_is_the_callers_mistake(stage: Any) -> None:
    with pytest.raises(FailureError) as caught:
        await call(
            stage.stub.LoadPolicy,
            pb.LoadPolicyRequest(),
            pb.LoadPolicyResponse,
            timeout=30,
            peer="agent",
            token=Secret.LEARNER_TO_INFERENCE.here(),
        )
    assert caught.value.code == "invalid_input"


# --- slots and retiring


async def test_without_a_free_slot_a_version_is_refused(make_stage: Any) -> None:
    stage = await make_stage(slots=2)
    await stage.look()
    one, two, three = (stage.publish(step) for step in (1, 2, 3))
    await stage.load(one)
    await stage.load(two)
    with pytest.raises(FailureError) as caught:
        await stage.load(three)
    assert (caught.value.code, caught.value.retryable) == ("no_free_slot", False)
    await stage.load(two)  # what is loaded needs no second slot
    await stage.retire(one)
    await stage.load(three)
    assert await stage.proved() == {2: True, 3: True}


async def test_the_engine_unloads_before_the_files_are_deleted(stage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    version = stage.publish(1)
    await stage.load(version)
    there: list[bool] = []
    unload = stage.loaded.engine.unload

    async def look_and_unload(name: str) -> None:
        there.append((stage.adapters / name / WEIGHTS).is_file())
        await unload(name)

    monkeypatch.setattr(stage.loaded.engine, "unload", look_and_unload)
    await stage.retire(version)
    assert there == [True]
    assert stage.folders() == []
    assert stage.engine.adapters == {}
    assert await stage.proved() == {}


async def test_retiring_twice_or_what_was_never_loaded_is_not_an_error(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    await stage.retire(version)
    await stage.retire(version)
    await stage.retire(stage.publish(2))
    assert stage.engine.calls == [f"load {version.name}", f"unload {version.name}"]


async def test_files_that_the_engine_still_lists_are_never_deleted(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    stage.engine.clings = True
    with pytest.raises(FailureError) as caught:
        await stage.retire(version)
    assert caught.value.code == "still_listed"
    assert stage.folders() == [version.name]
    assert await stage.proved() == {}, "it counts as gone all the same"
    stage.engine.clings = False
    await stage.look()
    assert stage.folders() == []
    assert await stage.state() == "READY"


async def test_a_version_that_is_still_unloading_takes_a_slot(make_stage: Any) -> None:
    stage = await make_stage(slots=1)
    await stage.look()
    one, two = stage.publish(1), stage.publish(2)
    await stage.load(one)
    stage.engine.clings = True
    with pytest.raises(FailureError):
        await stage.retire(one)
    with pytest.raises(FailureError, match="still lists"):
        await stage.load(two)
    stage.engine.clings = False
    await stage.load(two)
    assert await stage.proved() == {2: True}


async def test_a_version_retired_while_the_engine_is_gone_does_not_come_back(stage: Any) -> None:
    one, two = stage.publish(1), stage.publish(2)
    await stage.load(one)
    await stage.load(two)
    await stage.engine.stop()
    with pytest.raises(FailureError) as caught:
        await stage.retire(one)
    assert caught.value.code == "engine_unreachable"
    await stage.look()
    await stage.engine.start()
    await stage.look()
    assert list(stage.engine.adapters) == [two.name]
    assert stage.folders() == [two.name]
    assert await stage.proved() == {2: True}


# --- what an earlier agent left


async def test_what_an_earlier_agent_left_is_unloaded_and_removed(make_stage: Any, tmp_path: Path) -> None:
    stage = await make_stage()
    old = stage.adapters / "job.9.abc"
    old.mkdir()
    (old / "adapter_config.json").write_bytes(b"{}")
    (stage.adapters / "job.8.abc.partial").mkdir()
    stage.engine.adapters |= {"job.9.abc": str(old), "of-the-user": str(tmp_path)}
    await stage.look()
    assert stage.folders() == []
    assert stage.engine.adapters == {"of-the-user": str(tmp_path)}, "what the user gave the engine is not ours"


async def test_a_folder_that_cannot_be_made_is_named(make_stage: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match=f"adapters_dir: {tmp_path}/file/adapters cannot be made"):
        await make_stage(adapters_dir=str(tmp_path / "file" / "adapters"))


async def test_the_engine_is_given_absolute_paths(
    make_stage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = await make_stage(adapters_dir="adapters")
    await stage.look()
    version = stage.publish(1)
    await stage.load(version)
    assert stage.engine.adapters == {version.name: str(tmp_path / "adapters" / version.name)}


async def test_two_versions_of_one_name_are_never_mixed_up(stage: Any) -> None:
    version = stage.publish(1)
    await stage.load(version)
    twin = PolicyVersion(job="job", step=1, sha256=version.policy.sha256[:12] + "0" * 52)
    assert twin.name == version.name
    with pytest.raises(FailureError) as caught:
        await stage.load(type(version)(twin, version.uri, version.folder))
    assert caught.value.code == "wrong_policy"


@pytest.mark.parametrize(
    ("job", "step", "sha256"),
    [("../..", 1, "ab" * 32), ("a/b", 1, "ab" * 32), ("job", -1, "ab" * 32), ("job", 1, "../x"), ("", 1, "ab" * 32)],
)
async def test_a_version_that_would_leave_the_folder_is_refused(
    make_stage: Any, job: str, step: int, sha256: str
) -> None:
    stage = await make_stage()
    policy = common_pb2.PolicyVersion(job=job, step=step, sha256=sha256)
    folder = Path(stage.settings.adapters_dir)
    before = sorted(folder.parent.rglob("*"))
    for method, request, answer in (
        (stage.stub.LoadPolicy, pb.LoadPolicyRequest(policy=policy, uri="file:///nowhere"), pb.LoadPolicyResponse),
        (stage.stub.RetirePolicy, pb.RetirePolicyRequest(policy=policy), pb.RetirePolicyResponse),
    ):
        with pytest.raises(KestrlError, match="name no version"):
            await call(method, request, answer, timeout=20, peer="agent", token=Secret.LEARNER_TO_INFERENCE.here())
    assert sorted(folder.parent.rglob("*")) == before
