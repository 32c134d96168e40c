"""Out of the routers without losing a request, and in again: the order of calls, and what is refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent import router
from agent.router import DrainRefused, Router, RouterError

from tests.unit.agent_observation.loopback import Engine, FakeRouter, Reply, Request, chat_reply

LIMITS = {"drain_s": 5, "probe_s": 5, "router_s": 3, "min_admitted": 1}
NewRouter = Callable[[], FakeRouter]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "POLL_S", 0.05)


@pytest.fixture
def engine() -> Iterator[Engine]:
    one = Engine()
    yield one
    one.close()


class Said(list[str]):
    def __call__(self, text: str, event: str = "info", **_: Any) -> None:
        self.append(text)


def worker(engine: Engine, *routers: FakeRouter, **changed: Any) -> dict[str, Any]:
    return {
        "name": "decode1",
        "role": "decode",
        "host": engine.host,
        "port": engine.port,
        "url": engine.url,
        "bootstrap_port": None,
        "routers": [{"url": one.url, "metrics_url": None} for one in routers],
        **changed,
    }


def secrets(*routers: FakeRouter) -> dict[str, Any]:
    return {"router_keys": {one.url: one.key for one in routers if one.key}, "api_key": "worker-key"}


def listing(new: NewRouter, engine: Engine, others: int = 1) -> FakeRouter:
    """A router that lists this decode worker, others of its role, and a prefill."""
    one = new()
    one.add(engine.url, "decode")
    for number in range(others):
        one.add(f"http://decode{number + 2}.example.internal:30002", "decode")
    one.add("http://prefill1.example.internal:30000", "prefill", bootstrap_port=8998)
    return one


def drain(engine: Engine, *routers: FakeRouter, say: Said | None = None, **limits: Any) -> router.DrainResult:
    return router.drain(worker(engine, *routers), secrets(*routers), {**LIMITS, **limits}, Said() if say is None else say)


def admit(engine: Engine, *routers: FakeRouter, **changed: Any) -> list[str]:
    return router.admit(worker(engine, *routers, **changed), secrets(*routers), LIMITS, Said())


# -- listing


def test_workers_are_listed(fake_router: NewRouter, engine: Engine) -> None:
    one = fake_router()
    one.key = "admin"
    one.add(engine.url, "unified", healthy=False)
    one.add("http://p:1", "prefill", bootstrap_port=7)
    first, second = Router(one.url, "admin").workers()
    assert (first.url, first.role, first.healthy) == (engine.url, "unified", False)
    assert (second.role, second.healthy, second.bootstrap_port) == ("prefill", True, 7)


def test_a_refused_key_says_which_key(fake_router: NewRouter) -> None:
    one = fake_router()
    one.key = "admin"
    with pytest.raises(RouterError, match="control-plane key"):
        Router(one.url, "wrong").workers()


@pytest.mark.parametrize("reply", [Reply(json={}), Reply(json={"workers": [{"url": "x"}]}), Reply(body=b"ok")])
def test_what_is_no_list_is_an_error(fake_router: NewRouter, reply: Reply) -> None:
    one = fake_router()
    one.answer = lambda _: reply
    with pytest.raises(RouterError, match=r"no worker list|expected JSON"):
        Router(one.url, None).workers()


# -- drain


def test_drain_removes_from_every_router_and_waits_for_the_worker(fake_router: NewRouter, engine: Engine) -> None:
    first, second = listing(fake_router, engine), listing(fake_router, engine)
    engine.loads = [{"num_running_reqs": 2, "num_waiting_reqs": 0}]

    class Finishing(Said):
        def __call__(self, text: str, event: str = "info", **fields: Any) -> None:
            super().__call__(text)
            if "2 request" in text:
                assert engine.url not in first.urls() + second.urls()  # asked only after it got no new ones
                engine.loads = [{"num_running_reqs": 0, "num_waiting_reqs": 0}]

    found = drain(engine, first, second, say=Finishing())
    assert (found.removed, found.dead) == ([first.url, second.url], False)
    assert engine.url not in first.urls() + second.urls()
    assert engine.paths().count("/v1/loads") >= 3  # busy once, idle twice


def test_drain_is_refused_before_anything_is_changed(fake_router: NewRouter, engine: Engine) -> None:
    first, second = listing(fake_router, engine), listing(fake_router, engine, others=0)
    with pytest.raises(DrainRefused, match=r"has 0 healthy decode worker\(s\), expected at least 1") as caught:
        drain(engine, first, second)
    assert caught.value.restored
    assert first.paths("DELETE") == second.paths("DELETE") == []


def test_unhealthy_and_other_roles_do_not_count(fake_router: NewRouter, engine: Engine) -> None:
    one = listing(fake_router, engine, others=0)
    one.add("http://ill.example.internal:1", "decode", healthy=False)
    with pytest.raises(DrainRefused, match="has 0 healthy decode"):
        drain(engine, one)


def test_ranks_of_one_worker_count_once(fake_router: NewRouter, engine: Engine) -> None:
    one = fake_router()
    for rank in range(3):
        one.add(f"{engine.url}@{rank}", "decode")
        one.add(f"http://two.example.internal:1@{rank}", "decode")
    with pytest.raises(DrainRefused, match="has 1 healthy decode"):
        drain(engine, one, min_admitted=2)
    assert drain(engine, one).removed == [one.url]
    assert not any(engine.url in url for url in one.urls())


def test_min_admitted_zero_lets_the_last_one_go(fake_router: NewRouter, engine: Engine) -> None:
    assert drain(engine, listing(fake_router, engine, others=0), min_admitted=0).removed


def test_another_worker_that_goes_meanwhile_puts_this_one_back(fake_router: NewRouter, engine: Engine) -> None:
    first, second = listing(fake_router, engine), listing(fake_router, engine)

    def lose() -> None:
        for one in second.listed.values():
            if "decode2" in one["url"]:
                one["is_healthy"] = False

    second.after_delete = lose
    with pytest.raises(DrainRefused, match="The worker is back in its routers") as caught:
        drain(engine, first, second)
    assert caught.value.restored
    assert engine.url in first.urls()
    assert engine.url in second.urls()


def test_a_router_that_keeps_listing_it(fake_router: NewRouter, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Router.remove, "__defaults__", (0.5,))
    first, second = listing(fake_router, engine), listing(fake_router, engine)
    second.ignores_delete = True
    with pytest.raises(DrainRefused, match="still lists") as caught:
        drain(engine, first, second)
    assert caught.value.restored
    assert engine.url in first.urls()


def test_a_worker_that_stays_busy_is_put_back(fake_router: NewRouter, engine: Engine) -> None:
    one = listing(fake_router, engine)
    engine.loads = [{"num_running_reqs": 1, "num_waiting_reqs": 0}]
    with pytest.raises(DrainRefused, match=r"not idle 1 s after .* 1 request\(s\) running") as caught:
        drain(engine, one, drain_s=0.6)
    assert caught.value.restored
    assert engine.url in one.urls()


def test_loads_that_cannot_be_read_are_not_idle(fake_router: NewRouter, engine: Engine) -> None:
    engine.loads = []
    with pytest.raises(DrainRefused, match="found no loads"):
        drain(engine, listing(fake_router, engine), drain_s=0.6)


def test_one_idle_look_is_not_enough(fake_router: NewRouter, engine: Engine) -> None:
    """A request that is on its way from the router to the scheduler is in no count yet."""
    seen = iter([0, 1, 0])

    def answer(request: Request) -> Reply:
        if request.path == "/v1/loads":
            return Reply(json={"loads": [{"num_running_reqs": next(seen, 0), "num_waiting_reqs": 0}]})
        return Reply(200)

    engine.answer = answer
    drain(engine, listing(fake_router, engine))
    assert engine.paths().count("/v1/loads") == 4


def test_busy_and_not_healthy_cannot_be_put_back_and_says_so(fake_router: NewRouter, engine: Engine) -> None:
    one = listing(fake_router, engine)
    engine.loads = [{"num_running_reqs": 1, "num_waiting_reqs": 0}]
    engine.health = 503
    with pytest.raises(DrainRefused, match="could not be put back") as caught:
        drain(engine, one, drain_s=0.3)
    assert not caught.value.restored
    assert one.paths("POST") == []


def test_a_dead_worker_is_idle(fake_router: NewRouter, engine: Engine) -> None:
    one = listing(fake_router, engine)
    engine.close()
    found = drain(engine, one)
    assert (found.removed, found.dead) == ([one.url], True)
    assert engine.url not in one.urls()


def test_a_worker_that_no_router_lists_needs_no_peers(fake_router: NewRouter, engine: Engine) -> None:
    one = fake_router()
    assert drain(engine, one).removed == []
    assert one.paths("DELETE") == []


def test_an_unreachable_router_refuses_before_anything(fake_router: NewRouter, engine: Engine, dead_port: int) -> None:
    one = listing(fake_router, engine)
    described = worker(engine, one)
    described["routers"].append({"url": f"http://127.0.0.1:{dead_port}", "metrics_url": None})
    with pytest.raises(DrainRefused, match=r"refused.*Nothing was changed") as caught:
        router.drain(described, secrets(one), LIMITS, Said())
    assert caught.value.restored
    assert one.paths("DELETE") == []


# -- admit


def without(new: NewRouter) -> FakeRouter:
    """A router with all roles but without this worker."""
    one = new()
    one.add("http://decode2.example.internal:30002", "decode")
    one.add("http://prefill1.example.internal:30000", "prefill", bootstrap_port=8998)
    return one


def test_admit_adds_and_sends_one_request_through(fake_router: NewRouter, engine: Engine) -> None:
    one = without(fake_router)
    assert admit(engine, one) == []
    assert engine.url in one.urls()
    (added,) = [request.json() for request in one.requests if (request.method, request.path) == ("POST", "/workers")]
    assert added == {"url": engine.url, "worker_type": "decode", "api_key": "worker-key"}
    assert one.paths("POST") == ["/workers", "/v1/chat/completions"]
    assert "/v1/models" in one.paths()


def test_a_prefill_is_added_with_its_bootstrap_port(fake_router: NewRouter, engine: Engine) -> None:
    one = without(fake_router)
    admit(engine, one, role="prefill", bootstrap_port=8999)
    added = next(request.json() for request in one.requests if request.method == "POST")
    assert (added["worker_type"], added["bootstrap_port"]) == ("prefill", 8999)


def test_a_unified_worker_is_a_regular_one_and_needs_no_other(fake_router: NewRouter, engine: Engine) -> None:
    one = fake_router()
    assert admit(engine, one, role="unified") == []
    added = next(request.json() for request in one.requests if request.method == "POST")
    assert added["worker_type"] == "regular"


def test_listed_and_healthy_is_left_alone(fake_router: NewRouter, engine: Engine) -> None:
    one = listing(fake_router, engine)
    before = dict(one.listed)
    admit(engine, one)
    assert one.listed == before
    assert engine.paths() == []
    assert one.paths("POST") == ["/v1/chat/completions"]


@pytest.mark.parametrize(("healthy", "port"), [(False, 8998), (True, 1)], ids=["unhealthy", "other bootstrap port"])
def test_an_entry_that_does_not_fit_is_made_anew(fake_router: NewRouter, engine: Engine, healthy: bool, port: int) -> None:
    one = without(fake_router)
    one.add(engine.url, "prefill", healthy=healthy, bootstrap_port=port)
    admit(engine, one, role="prefill", bootstrap_port=8998)
    (now,) = [entry for entry in one.listed.values() if entry["url"] == engine.url]
    assert (now["is_healthy"], now["bootstrap_port"]) == (True, 8998)
    assert len(one.paths("DELETE")) == 1


@pytest.mark.parametrize("health", [503, 302])
def test_a_worker_that_is_not_healthy_is_never_added(fake_router: NewRouter, engine: Engine, health: int) -> None:
    one = without(fake_router)
    engine.health = health
    with pytest.raises(RouterError, match=f"found status {health} of the worker's /health"):
        admit(engine, one)
    assert one.paths("POST") == []


def test_never_healthy_there_is_withdrawn_and_said(fake_router: NewRouter, engine: Engine) -> None:
    one = without(fake_router)
    one.add_healthy = False
    started = time.monotonic()
    with pytest.raises(RouterError, match=r"expected it listed and healthy as decode.*cannot be cancelled"):
        admit(engine, one)
    assert time.monotonic() - started < 15
    assert engine.url not in one.urls()


@pytest.mark.parametrize("job", ["processing", {"status": "pending"}])
def test_listed_while_its_job_runs_is_not_done(fake_router: NewRouter, engine: Engine, job: Any) -> None:
    one = without(fake_router)
    one.add_job = job
    with pytest.raises(RouterError, match=r"its job: (processing|pending)"):
        admit(engine, one)


def test_a_failed_job_is_refused_at_once(fake_router: NewRouter, engine: Engine) -> None:
    one = without(fake_router)
    one.add_job = {"status": "failed", "message": "no /server_info"}
    started = time.monotonic()
    with pytest.raises(RouterError, match="no /server_info"):
        admit(engine, one)
    assert time.monotonic() - started < LIMITS["router_s"]


def test_router_lost_between_drain_and_admit(fake_router: NewRouter, engine: Engine) -> None:
    one = listing(fake_router, engine)
    drain(engine, one)
    one.close()
    started = time.monotonic()
    with pytest.raises(RouterError, match=r"router http://.*refused.*check that the router runs"):
        admit(engine, one)
    assert time.monotonic() - started < 30


def test_router_that_restarts_between_drain_and_admit_is_waited_for(fake_router: NewRouter, engine: Engine) -> None:
    """A router's restart lists its command-line workers again, some seconds later."""
    one = listing(fake_router, engine)
    drain(engine, one)
    one.close()
    again: list[FakeRouter] = []

    def restart() -> None:
        again.append(FakeRouter(port=one.port))
        again[0].add(engine.url, "decode")
        again[0].add("http://prefill1.example.internal:30000", "prefill", bootstrap_port=8998)

    timer = threading.Timer(0.7, restart)
    timer.start()
    try:
        assert admit(engine, one) == []
        assert again[0].paths("POST") == ["/v1/chat/completions"]
    finally:
        timer.join()
        again[0].close()


def test_second_router_lost_withdraws_from_the_first(fake_router: NewRouter, engine: Engine, dead_port: int) -> None:
    one = without(fake_router)
    described = worker(engine, one)
    described["routers"].append({"url": f"http://127.0.0.1:{dead_port}", "metrics_url": None})
    with pytest.raises(RouterError, match="refused"):
        router.admit(described, secrets(one), LIMITS, Said())
    assert engine.url not in one.urls()


def test_request_through_the_router_fails(fake_router: NewRouter, engine: Engine) -> None:
    """F8: both sides are healthy, but nothing comes through any more."""
    one = without(fake_router)
    one.chat = lambda _: Reply(500, body=b"kv transfer")
    with pytest.raises(RouterError, match=r"a request through it failed.*kv transfer"):
        admit(engine, one)
    assert engine.url not in one.urls()


def test_a_busy_router_is_asked_again(fake_router: NewRouter, engine: Engine) -> None:
    one = without(fake_router)
    answers = iter([Reply(503), Reply(503)])
    one.chat = lambda _: next(answers, chat_reply())
    assert admit(engine, one) == []


def test_models_route_fails(fake_router: NewRouter, engine: Engine) -> None:
    """F9: completions are fine, the models route is not."""
    one = without(fake_router)
    one.models = Reply(500)
    with pytest.raises(RouterError, match="status 500 of GET /v1/models"):
        admit(engine, one)


def test_without_the_other_role_no_request_is_possible_and_that_is_said(fake_router: NewRouter, engine: Engine) -> None:
    one = fake_router()
    (note,) = admit(engine, one)
    assert "it has no healthy prefill worker" in note
    assert "/v1/chat/completions" not in one.paths()


def test_expected_content_is_looked_for_through_the_router(fake_router: NewRouter, engine: Engine) -> None:
    one = without(fake_router)
    generation = {"prompt": "2+2?", "expect": "five", "max_tokens": 8}
    with pytest.raises(RouterError, match="expected one that matches 'five'"):
        router.admit(worker(engine, one), secrets(one), LIMITS, Said(), generation)


def test_an_inference_key_of_its_own(fake_router: NewRouter, engine: Engine) -> None:
    """/workers takes the control-plane key, inference another one."""
    one = without(fake_router)
    one.key = "admin"

    def needs(key: str) -> Callable[[Request], Reply]:
        return lambda request: chat_reply() if request.headers["authorization"] == f"Bearer {key}" else Reply(401)

    for known in ("worker-key", "admin"):
        one.chat = needs(known)
        assert admit(engine, one) == []
    one.chat = needs("somebody else's")
    (note,) = admit(engine, one)
    assert "inference key that is not known here" in note


def test_same_worker() -> None:
    assert router.same("http://d:1@3", "http://d:1/")
    assert router.same("http://d:1/", "http://d:1")
    assert not router.same("http://d:10", "http://d:1")
