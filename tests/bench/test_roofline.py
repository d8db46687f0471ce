"""What a step must move and compute at least, and what a device allows."""

from bench.limits import GPUS, Limits, cpu_limits, known_gpu
from bench.roofline import Costs, Work


def test_the_least_of_a_step_is_its_weights_its_contexts_and_its_products() -> None:
    costs = Costs(
        layer_matrices=1000,
        head_matrix=100,
        weight_bytes=4400,
        kv_token_bytes=8,
        attention_flops=16,
    )

    one, many = costs.decode(1, 10), costs.decode(4, 10)

    assert (one.bytes_moved, one.flops) == (4480, 2360)
    assert (many.bytes_moved, many.flops) == (4720, 9440)
    assert costs.prefill(3) == Work(4424, 2 * (3 * 1000 + 100) + 6 * 16)


def test_a_step_waits_for_what_takes_longer() -> None:
    limits = Limits("x", bytes_per_s=100.0, flops_per_s=1000.0, source="")

    assert (Work(200, 1000).limit_s(limits), Work(200, 1000).bound(limits)) == (2.0, "memory")
    assert (Work(200, 4000).limit_s(limits), Work(200, 4000).bound(limits)) == (4.0, "FLOP")


def test_of_gpus_the_most_particular_name_counts() -> None:
    assert known_gpu("NVIDIA H100 PCIe") == GPUS["H100 PCIe"]
    assert known_gpu("NVIDIA H100 80GB HBM3") == GPUS["H100"]
    assert known_gpu("NVIDIA L40S") == GPUS["L40S"]
    assert known_gpu("Some Other") is None


def test_a_processor_is_measured_by_a_program_made_for_it() -> None:
    limits = cpu_limits(1)

    assert limits.bytes_per_s > 1e8
    assert limits.flops_per_s > 1e8
