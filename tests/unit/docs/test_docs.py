"""What the documents say exists, exists; what they tell people to write is taken; what they say of the code is so."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import yaml

from kestrl._shared.plan.planning import plan
from kestrl._shared.spec import AgentRLJob
from kestrl._shared.spec.load import parse_job
from kestrl._shared.telemetry.names import Instrument, Metric
from kestrl_operator.render import Given, network, render
from kestrl_operator.render.patching import RESERVED_FIELDS
from kestrl_operator.state.accelerators import BUILT_IN, Profile
from kestrl_operator.state.chart_values import Cluster, read_cluster
from kestrl_operator.state.cluster import GRPC_PORT, HTTP_PORT, METRICS_PORT, site_of
from kestrl_operator.status.conditions import REASONS, Type
from kestrl_operator.status.failures import backoff
from kestrl_operator.watch.streams import settings

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "charts/kestrl/README.md", ROOT / "Dockerfiles/README.md"]
)
VALUES: dict[str, Any] = yaml.safe_load((ROOT / "charts/kestrl/values.yaml").read_text())
QUICKSTART: dict[str, Any] = yaml.safe_load((ROOT / "examples/email-search/quickstart.yaml").read_text())
NAMED = re.compile(r"`(test_\w+\.py)::(\w+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|yaml|toml|md))(?::[^`]*)?`")
CLAIM = re.compile(r"`(\w+)=(True|False|Unknown)/(\w+)`")
NONE = "none"


def page(name: str) -> str:
    return (DOCS / name).read_text()


def test_every_test_that_the_documents_name_exists() -> None:
    named = {match for path in DOCS.glob("*.md") for match in NAMED.findall(path.read_text())}
    assert len(named) > 20
    texts: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        texts[path.name] = texts.get(path.name, "") + path.read_text()
    missing = [(file, name) for file, name in named if not re.search(rf"\b{name}\b", texts.get(file, ""))]
    assert missing == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_a_document_names_exists(path: Path) -> None:
    known = [
        f"/{item.relative_to(ROOT).as_posix()}"
        for folder in ("src", "services", "operator", "scripts", "tests", "charts", "examples", "docs")
        for item in (ROOT / folder).rglob("*.*")
    ] + [f"/{item.name}" for item in ROOT.iterdir()]
    text = path.read_text()
    words = FILE.findall(FENCE.sub("", text))
    users_own = {
        *re.findall(r"`([\w./-]+)`:\s*```", text),
        "my_agent.py",
        "mine.py",
        "job.yaml",
        "summary.json",
        "uv.lock",
    }
    missing = [word for word in words if word not in users_own and not any(item.endswith(f"/{word}") for item in known)]
    assert missing == []


def anchors(text: str) -> set[str]:
    """How GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(path: Path) -> None:
    broken = []
    for target, anchor in LINK.findall(FENCE.sub("", path.read_text())):
        there = (path.parent / target).resolve() if target else path
        if not there.exists() or (anchor and anchor not in anchors(there.read_text())):
            broken.append(f"{target}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_table_has_as_many_cells_in_each_row(path: Path) -> None:
    lines = FENCE.sub("", path.read_text()).splitlines()
    rows = [(number, line) for number, line in enumerate(lines) if line.startswith("|")]
    width: dict[int, int] = {}
    uneven = []
    for number, line in rows:
        cells = len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", lambda code: code[0].replace("|", ""), line)))
        width[number] = width.get(number - 1, cells)
        if cells != width[number]:
            uneven.append(line)
    assert uneven == []


class Snippet(NamedTuple):
    """A YAML block of a page."""

    place: str
    content: dict[str, Any]

    @property
    def kind(self) -> str:
        if "kind" in self.content:
            return "job" if self.content["kind"] == "AgentRLJob" else "object"
        return "spec" if set(self.content) == {"spec"} else "values"


def snippets() -> Iterator[Snippet]:
    for path in sorted(DOCS.glob("*.md")):
        for number, (language, text) in enumerate(FENCE.findall(path.read_text())):
            if language == "yaml":
                yield Snippet(f"{path.name}-{number}", yaml.safe_load(text))


def of_kind(*kinds: str) -> list[Any]:
    return [pytest.param(item, id=item.place) for item in snippets() if item.kind in kinds]


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """As Helm merges values; a list is replaced."""
    made = copy.deepcopy(dict(base))
    for name, value in changes.items():
        inner = made.get(name)
        made[name] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return made


def rendered(job: AgentRLJob, cluster: Cluster) -> list[dict[str, Any]]:
    components = plan(job, site_of(job, "team-a", cluster, run="r", storage="s3://bucket/r"))
    return render(
        Given(
            job=job,
            namespace="team-a",
            uid="u",
            components=components,
            cluster=cluster,
            secrets={},
            storage="s3://runs",
        )
    )


@pytest.mark.parametrize("snippet", of_kind("values"))
def test_values_in_a_document_are_the_charts(snippet: Snippet) -> None:
    values = merged(VALUES, snippet.content)
    jsonschema.validate(values, json.loads((ROOT / "charts/kestrl/values.schema.json").read_text()))
    cluster = read_cluster(values["jobs"])
    for profile in cluster.accelerators:
        job = parse_job(merged(QUICKSTART, {"spec": {"inference": {"accelerator": {"profile": profile}}}}))
        assert rendered(job, cluster)


@pytest.mark.parametrize("snippet", of_kind("job", "spec"))
def test_a_job_in_a_document_is_one(snippet: Snippet) -> None:
    """A piece of a manifest is taken with the rest of the quickstart's around it, down to the pods that its patches
    change."""
    job = parse_job(snippet.content if snippet.kind == "job" else merged(QUICKSTART, snippet.content))
    assert rendered(job, read_cluster(VALUES["jobs"]))


@pytest.mark.parametrize("snippet", of_kind("object"))
def test_another_object_in_a_document_says_what_it_is(snippet: Snippet) -> None:
    assert {"apiVersion", "kind", "metadata"} <= set(snippet.content)
    if snippet.content["kind"] == "HorizontalPodAutoscaler":
        target = snippet.content["spec"]["scaleTargetRef"]
        assert (target["apiVersion"], target["kind"]) in {
            ("kestrl.dev/v1alpha1", "AgentRLJob"),
            ("apps/v1", "StatefulSet"),
        }


def test_there_is_yaml_of_every_kind_to_look_at() -> None:
    assert {item.kind for item in snippets()} >= {"values", "spec", "object"}


def test_a_reason_that_a_document_names_is_on_the_closed_list() -> None:
    claims = {claim for path in PAGES for claim in CLAIM.findall(path.read_text())}
    assert len(claims) > 15
    unknown = [(kind, reason) for kind, _, reason in claims if reason not in REASONS[Type(kind)]]
    assert unknown == []


def rows(text: str, heading: str) -> list[list[str]]:
    """The cells of the first table whose head begins so."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith(heading))
    table = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def test_kopfs_settings_are_those_of_the_table() -> None:
    ours = settings()
    for name, value, _ in rows(page("operator.md"), "| setting |"):
        section, _, field = name.strip("`").partition(".")
        found = getattr(getattr(ours, section), field)
        if value.startswith("`"):
            assert str(found) == value.strip("`"), name
        else:
            assert type(found).__name__ in {"_NoDiff", "_NoProgress"} or "kestrl" in str(found), name


def test_every_pitfall_is_answered_in_a_file() -> None:
    table = rows(page("operator.md"), "| # | pitfall |")
    assert [int(row[0]) for row in table] == list(range(1, 29))
    assert [row[0] for row in table if not FILE.findall(row[3])] == []


def test_backoff_times_are_those_of_the_table() -> None:
    line = next(line for line in page("operations.md").splitlines() if line.startswith("| waits |"))
    assert [float(number) for number in re.findall(r"(\d+) s", line)] == [backoff(attempts) for attempts in range(6)]


@pytest.mark.parametrize("name", ["operations.md"])
def test_what_a_patch_may_not_change_is_named(name: str) -> None:
    text = page(name)
    assert [field for field in RESERVED_FIELDS if f"`{field}`" not in text] == []


def test_arrows_and_ports_are_those_of_the_policies() -> None:
    text = page("security.md")
    for block in network.METADATA:
        assert f"`{block}`" in text
    ports = ", ".join(map(str, read_cluster(VALUES["jobs"]).egress_ports))
    assert f"| {ports} (`jobs.egressPorts`) |" in text
    table = {(row[0], row[1]): row[2] for row in rows(text, "| from | to |")}
    names = {"inference": "engine agent, engine", "rollout": "workers", "learner": "learner"}
    for called, callers in network.CALLERS.items():
        for caller in callers:
            who = {"rollout": "worker"}.get(caller, str(caller))
            whom = names.get(called, "tools, judge")
            wanted = f"{GRPC_PORT}, {HTTP_PORT}" if called == "inference" else str(GRPC_PORT)
            assert table[who, whom] == wanted
    assert table["anybody in the cluster", "every pod's metrics"] == str(METRICS_PORT)


def test_profiles_are_listed_completely() -> None:
    text = page("accelerators.md")
    fields = {field.alias for field in Profile.model_fields.values()}
    listed = " ".join(row[0] for row in rows(text, "| field | is |"))
    assert {name for name in fields if f"`{name}`" not in listed} == set()
    for name, resource, image, _ in rows(text, "| built in |"):
        profile = BUILT_IN[name.strip("`")]
        assert (profile.resource or NONE, profile.image) == (resource.strip("`"), image.strip("`"))
    assert len(rows(text, "| built in |")) == len(BUILT_IN)


def test_the_operators_rights_are_those_of_the_table() -> None:
    """Each resource of the chart's roles stands in docs/security.md with all of its verbs."""
    text = (ROOT / "charts/kestrl/templates/rbac.yaml").read_text()
    rules = re.findall(r"resources: \[(.*?)\]\n(?:.*resourceNames.*\n)?\s+verbs: \[(.*?)\]", text)
    assert len(rules) >= 10
    listed = [(row[0], set(re.findall(r"\w+", row[1]))) for row in rows(page("security.md"), "| what | verbs |")]
    for resources, verbs in rules:
        for resource in resources.split(", "):
            matching = [words for what, words in listed if f"`{resource}`" in what]
            assert any(set(verbs.split(", ")) <= words for words in matching), f"{resource}: {verbs}"


def test_alerts_and_metrics_that_documents_name_are_there() -> None:
    alerts = (ROOT / "charts/kestrl/templates/alerts.yaml").read_text()
    metrics = [value.name.replace(".", "_") for value in vars(Metric).values() if isinstance(value, Instrument)]
    for path in DOCS.glob("*.md"):
        text = path.read_text()
        assert [name for name in re.findall(r"`(Kestrl[A-Z]\w+)`", text) if f"alert: {name}\n" not in alerts] == []
        named = re.findall(r"`(kestrl_(?!dev|email)[a-z]+_\w+)`", text)
        assert [name for name in named if not any(name.startswith(metric) for metric in metrics)] == []


def test_no_document_names_a_path_of_a_developers_machine() -> None:
    assert [str(path) for path in PAGES if re.search(r"/(work|root|home)/", path.read_text())] == []
