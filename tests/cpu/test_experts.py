"""Expert weights on the CPU tier: prepared when first used, within a limit of memory."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from contract.dtypes import Q4_K, Q8_0
from reference.cpu.experts import SINGLE_THREAD_PRODUCTS, expert_products
from reference.cpu.prepared import PreparedExperts, PreparedMatrices
from reference.matrix import Matrix
from reference.ops.moe_gate_up import expert_products as defined
from tests.ops.experts import expert_matrices, routing

EXPERTS, ROWS, COLUMNS = 6, 40, 256


def products(
    experts: PreparedExperts, weight: Matrix, x: NDArray[np.float32], ids: NDArray[np.int32]
) -> NDArray[np.float32]:
    """x weight[ids]^T by the CPU tier's kernel."""
    out = np.empty((*ids.shape, weight.shape[1]), np.float32)
    expert_products(experts, [(weight, out)], x, ids, threads=2)
    return out


def test_an_expert_nobody_uses_is_not_prepared():
    """The memory is that of the experts used so far."""
    weight = expert_matrices(Q8_0, EXPERTS, ROWS, COLUMNS, 1)
    experts = PreparedExperts()
    x = np.ones((3, COLUMNS), np.float32)
    products(experts, weight, x, np.array([[2], [2], [4]], np.int32))
    two = experts.nbytes
    products(experts, weight, x, np.array([[4], [2], [4]], np.int32))
    assert experts.nbytes == two > 0
    products(experts, weight, x, np.array([[4], [2], [0]], np.int32))
    assert experts.nbytes == two * 3 // 2


def test_more_experts_than_the_limit_allows():
    """The least recently used go, and every result is that of the definition."""
    weight = expert_matrices(Q4_K, EXPERTS, ROWS, COLUMNS, 2)
    one = PreparedExperts()
    one.prepare(weight, 0)
    experts = PreparedExperts(limit_bytes=2 * one.nbytes)
    rng = np.random.default_rng(3)
    for seed in range(4):
        ids = routing(5, EXPERTS, 3, seed)
        x = rng.standard_normal((5, COLUMNS), dtype=np.float32)
        expected = defined(weight, np.repeat(x, 3, axis=0), ids)
        assert (products(experts, weight, x, ids) == expected).all()
        assert experts.nbytes <= 2 * one.nbytes
    kept = experts.prepare(weight, 5)
    assert experts.prepare(weight, 5) is kept


def test_forgetting_a_weight_drops_its_experts():
    """Memory that another weight may occupy next is not remembered."""
    matrices = PreparedMatrices()
    weight = expert_matrices(Q8_0, EXPERTS, ROWS, COLUMNS, 4)
    for index in (1, 5):
        matrices.experts.prepare(weight, index)
    assert matrices.nbytes > 0
    matrices.forget(weight)
    assert matrices.nbytes == 0


def test_many_threads_want_the_same_experts():
    """Concurrent steps prepare an expert once as far as the memory counts."""
    weight = expert_matrices(Q8_0, EXPERTS, ROWS, COLUMNS, 5)
    experts, alone = PreparedExperts(), PreparedExperts()
    for index in range(EXPERTS):
        alone.prepare(weight, index)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: experts.prepare(weight, index % EXPERTS), range(96)))
    assert experts.nbytes == alone.nbytes


def test_threads_that_take_turns_at_experts_change_no_bit():
    """Enough work for two threads, every expert of a token with an activation of its own."""
    weight = expert_matrices(Q8_0, 3, 512, 1024, 6)
    x = np.random.default_rng(7).standard_normal((20, 2, 1024), dtype=np.float32)
    ids = routing(20, 3, 2, 8)
    assert x.size * 512 >= SINGLE_THREAD_PRODUCTS
    expected = defined(weight, x.reshape(40, 1024), ids)
    assert (products(PreparedExperts(), weight, x, ids) == expected).all()
