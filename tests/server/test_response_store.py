"""Limits of the store of responses, against a plain model of it."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.server.response_store import ResponseStore


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def response(number: int, text: str = "") -> dict:
    return {"id": f"resp_{number}", "output": [{"type": "message", "text": text}]}


def test_ages_and_limits() -> None:
    clock = Clock()
    store = ResponseStore(ttl=10, max_entries=3, clock=clock)
    for number in range(4):
        clock.now += 1
        store.put("a", response(number), [])
    assert [store.get("a", f"resp_{number}") is not None for number in range(4)] == [False, True, True, True]
    clock.now += 9  # the second and third were put 11 and 10 seconds ago
    assert [store.get("a", f"resp_{number}") is not None for number in range(4)] == [False, False, False, True]
    assert store.get("b", "resp_3") is None
    assert not store.delete("b", "resp_3") and store.delete("a", "resp_3") and not store.delete("a", "resp_3")
    assert (len(store), store.bytes) == (0, 0)
    none = ResponseStore(ttl=0)
    entry = none.put("a", response(1), [])
    none.finish(entry, response(1, "later"))
    assert none.get("a", "resp_1") is None and none.bytes == 0


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "finish", "delete", "wait"]), st.integers(0, 5), st.integers(0, 200)),
        max_size=40,
    )
)
@settings(max_examples=200, deadline=None)
def test_bytes_are_those_of_what_is_kept(steps: list[tuple[str, int, int]]) -> None:
    clock = Clock()
    store = ResponseStore(ttl=50, max_entries=4, max_bytes=700, clock=clock)
    entries: dict[int, object] = {}
    for count, (step, number, amount) in enumerate(steps):
        if step == "put":
            entries[number] = store.put("a", response(number * 100 + count), [{"text": "x" * amount}])
        elif step == "finish" and number in entries:
            entry = entries[number]
            store.finish(entry, {**entry.response, "output": ["y" * amount]})  # type: ignore[attr-defined,arg-type]
            assert entry.ended.is_set()  # type: ignore[attr-defined]
        elif step == "delete" and number in entries:
            store.delete(*entries[number].key)  # type: ignore[attr-defined]
        elif step == "wait":
            clock.now += amount / 10
        kept = [entry for entry in entries.values() if store.get(*entry.key) is entry]  # type: ignore[attr-defined]
        assert len(store) >= len(kept) and len(store) <= 4 and store.bytes <= 700
        if len(kept) == len(store):
            assert store.bytes == sum(len(json.dumps([e.items, e.response])) for e in kept)  # type: ignore[attr-defined]
        assert all(entry.expires > clock.now for entry in kept)  # type: ignore[attr-defined]
