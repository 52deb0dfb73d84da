"""The probe of the processor: what Linux says of it, less what the environment hides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clearhead.base.errors import InputError
from clearhead.fast import probe

TEXT = "processor\t: 0\nvendor_id\t: AuthenticAMD\nmodel name\t: a name\nflags\t\t: fpu avx2 fma f16c avx512f\n"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    probe.processor.cache_clear()
    yield
    probe.processor.cache_clear()


def test_vendor_and_instructions_are_those_that_linux_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text(TEXT)
    monkeypatch.delenv(probe.HIDE, raising=False)
    monkeypatch.setattr(probe, "_CPUINFO", file)
    result = probe.processor()
    assert result.vendor == "AuthenticAMD" and "avx2" in result.isa
    assert not result.isa & {"amx", "avx512_bf16", "avx512_vnni"}


def test_what_the_environment_hides_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    has = probe.processor().isa
    monkeypatch.setenv(probe.HIDE, "avx512, amx")
    probe.processor.cache_clear()
    assert probe.processor().isa == {name for name in has if not name.startswith(("avx512", "amx"))}
    monkeypatch.setenv(probe.HIDE, "sse9")
    probe.processor.cache_clear()
    with pytest.raises(InputError, match="must name instruction sets among"):
        probe.processor()
