"""Tenants of a trace reach the block space: they are charged, capped, and wait alone."""

from dataclasses import replace

import numpy as np
import pytest

from pagedkv import TenantLimits
from pagedkv.errors import ConfigurationError
from pagedkv.planner.traces.request import TokenizedRequest
from pagedkv.simulation import ServingConfig, VirtualServer
from pagedkv.simulation.cost import CostModel
from pagedkv.simulation.planning.figures import Division

ONE_SECOND = CostModel(fixed_s=1.0)
CONFIG = ServingConfig(60, block_size=4, max_sequences=8, max_batched_tokens=64, tenants={"a": TenantLimits(cap=8)})


def request(number: int, tenant: str | None, salt: str | None = None, num_tokens: int = 16) -> TokenizedRequest:
    prompt = np.arange(num_tokens, dtype=np.int32) + 100 * number
    output = np.arange(8, dtype=np.int32) + 10_000 + 100 * number
    return TokenizedRequest(0.0, prompt, output, tenant=tenant, salt=salt)


def served(config: ServingConfig, requests: list[TokenizedRequest]) -> VirtualServer:
    server = VirtualServer(config, ONE_SECOND, is_divided=True)
    server.run(requests)
    server.check()
    return server


def test_a_tenant_at_its_cap_waits_and_others_do_not() -> None:
    requests = [request(number, tenant) for number, tenant in enumerate("aaab")]
    parts = {part.name: part for part in served(CONFIG, requests).parts(Division())}
    alone = {part.name: part for part in served(CONFIG, requests[3:]).parts(Division())}
    assert parts["b"].ttft_s == alone["b"].ttft_s  # charged to the unnamed tenant
    without = {part.name: part for part in served(replace(CONFIG, tenants=None), requests).parts(Division())}
    assert parts["a"].ttft_s != without["a"].ttft_s


def test_what_a_tenant_caches_is_within_its_cap() -> None:
    server = served(CONFIG, [request(number, "a") for number in range(5)])
    unnamed, of_a = server.statistics().tenants
    assert (of_a.tenant, of_a.num_cached <= 8, unnamed.num_cached) == ("a", True, 0)


def test_what_a_cap_can_never_hold_is_rejected() -> None:
    result = VirtualServer(CONFIG, ONE_SECOND).run([request(0, "a", num_tokens=40), request(1, None, num_tokens=40)])
    assert result.as_dict()["requests"]["num_rejected"] == 1


def test_a_report_names_tenants_only_where_there_are_any() -> None:
    assert CONFIG.as_dict()["tenants"] == {"a": {"cap": 8, "floor": 0}}
    assert "tenants" not in replace(CONFIG, tenants=None).as_dict()
    with pytest.raises(ConfigurationError, match="cap"):
        replace(CONFIG, tenants={"a": TenantLimits(cap=100)})
