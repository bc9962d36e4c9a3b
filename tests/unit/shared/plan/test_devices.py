"""The devices of a machine that engines and learner use, and what is reported where they are too few."""

from __future__ import annotations

import pytest
from tests.unit.shared.plan.test_plan import job_with

from kestrl._shared.plan.devices import (
    Need,
    assigned_devices,
    device_needs,
    device_variables,
    shared_devices,
)
from kestrl.errors import UserInputError

LEARNER = "learner-0"


def needs_of(*overrides: str) -> list[Need]:
    return list(device_needs(job_with(*overrides).spec))


GPUS = ("inference.accelerator={profile: nvidia}", "learner.accelerator={profile: nvidia}")


def test_a_cpu_is_no_device() -> None:
    assert needs_of() == []
    assert [need.component for need in needs_of(GPUS[1])] == [LEARNER]
    assert [need.component for need in needs_of(GPUS[0])] == ["engine-0", "engine-1"]


def test_engines_have_devices_of_their_own_and_the_learner_what_is_left() -> None:
    assigned = assigned_devices(needs_of(*GPUS), {"nvidia": ["3", "5", "7", "8"]})
    assert assigned == {"engine-0": ("3",), "engine-1": ("5",), LEARNER: ("7",)}
    assert shared_devices(assigned, needs_of(*GPUS)) == {}


def test_without_a_device_of_its_own_the_learner_shares_the_last_ones() -> None:
    needs = needs_of(*GPUS)
    assigned = assigned_devices(needs, {"nvidia": ["0", "1"]})
    assert assigned == {"engine-0": ("0",), "engine-1": ("1",), LEARNER: ("1",)}
    assert shared_devices(assigned, needs) == {"engine-1": ("1",)}


def test_devices_of_different_profiles_are_never_shared() -> None:
    needs = needs_of("inference.accelerator={profile: ascend}", GPUS[1])
    assigned = assigned_devices(needs, {"nvidia": ["0"], "ascend": ["0", "1"]})
    assert assigned == {"engine-0": ("0",), "engine-1": ("1",), LEARNER: ("0",)}
    assert shared_devices(assigned, needs) == {}


@pytest.mark.parametrize(
    ("overrides", "devices", "message"),
    [
        ((), [], "2 for 2 engines and 1 for the learner, and this machine offers none; use profile cpu"),
        ((), ["4"], r"2 for 2 engines and 1 for the learner, .* offers 1 \(4\); lower spec.inference.replicas$"),
        (
            ("inference.replicas=1", "inference.accelerator.count=2"),
            ["0"],
            r"2 for 1 engine and .*; lower spec.inference.accelerator.count$",
        ),
        (
            ("inference.accelerator.count=2",),
            ["0"],
            r"4 for 2 engines and .*; lower spec.inference.replicas and spec.inference.accelerator.count$",
        ),
        (
            ("inference.replicas=1", "learner.accelerator.count=2"),
            ["0"],
            r"1 for 1 engine and 2 for the learner, .*; lower spec.learner.accelerator.count$",
        ),
        (
            ("learner.accelerator.count=3",),
            ["0", "1"],
            r"2 for 2 engines and 3 for the learner, .*; lower spec.learner.accelerator.count$",
        ),
    ],
)
def test_a_shortage_names_what_to_lower(overrides: tuple[str, ...], devices: list[str], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        assigned_devices(needs_of(*GPUS, *overrides), {"nvidia": devices})


def test_as_many_devices_as_are_needed_are_enough() -> None:
    needs = needs_of(*GPUS, "inference.replicas=1", "learner.accelerator.count=2")
    assert assigned_devices(needs, {"nvidia": ["0", "1"]}) == {"engine-0": ("0",), LEARNER: ("0", "1")}


def test_processes_are_restricted_by_the_variable_of_their_profile() -> None:
    assert device_variables("nvidia", ["1", "2"]) == {
        "CUDA_VISIBLE_DEVICES": "1,2",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert device_variables("ascend", ["1"]) == {"ASCEND_RT_VISIBLE_DEVICES": "1"}
    assert device_variables("cpu", ["1"]) == {}
    assert device_variables("nvidia", []) == {}
