"""The benchmark of the index: groups read what the flat search does where frames are alike."""

from __future__ import annotations

from mmfast.bench.suites import stream_index


def test_rows_tell_what_groups_save_and_miss() -> None:
    flat, few, many = stream_index.index_rows("visits", 12_000, 4)
    assert flat["recall"] == 1 and flat["group_mb"] == 0 and flat["speedup"] == 1
    assert 0.5 < few["recall"] <= many["recall"] <= 1
    assert 0 < few["group_mb"] < flat["index_mb"] / 20
    assert few["index_mb"] == flat["index_mb"] + few["group_mb"]
    noise = stream_index.index_rows("noise", 12_000, 4)
    assert noise[1]["recall"] < few["recall"]  # said as it is
