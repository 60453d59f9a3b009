import pytest
import torch
from torch import nn

from gpt2llama.train.dropout import HashedDropout, hash_dropout


def lowbias32(x: int) -> int:
    """Wellons 2018, in Python's own integers."""
    x = ((x ^ x >> 16) * 0x7FEB352D) % 2**32
    x = ((x ^ x >> 15) * 0x846CA68B) % 2**32
    return x ^ x >> 16


@pytest.mark.parametrize("p", [0.15, 0.5, 0.999])
def test_the_coin_is_the_published_hash(p: float) -> None:
    x = torch.randn(3, 7, 11)
    torch.manual_seed(5)
    drawn = int(torch.randint(-(2**31), 2**31 - 1, (1,), dtype=torch.int32)) % 2**32
    torch.manual_seed(5)
    got = HashedDropout(p)(x)
    # as int32 the hash is compared, so its upper half lies below its lower half
    coins = [(lowbias32(i ^ drawn) ^ 2**31) / 2**32 for i in range(x.numel())]
    keep = torch.tensor(coins, dtype=torch.float64).view_as(x) >= p
    torch.testing.assert_close(got, x * keep / (1 - p))


@pytest.mark.parametrize("p", [0.05, 0.15, 0.5])
def test_coins_are_fair_and_independent(p: float) -> None:
    """Each count of kept numbers within five standard deviations of a fair coin's."""
    torch.manual_seed(1)
    drop, n = HashedDropout(p), 2**18
    masks = torch.stack([drop(torch.ones(n)) > 0 for _ in range(8)])
    kept = masks.double()

    def check(what: torch.Tensor, chance: float) -> None:
        spread = (chance * (1 - chance) / what.numel()) ** 0.5
        assert abs(what.double().mean().item() - chance) < 5 * spread

    q = 1 - p
    for mask in masks:
        check(mask, q)
        for lag in (1, 2, 64, 128, 4096):  # neighbours in a row, a head, a batch
            check(mask[lag:] & mask[:-lag], q * q)
    for one in range(8):
        for other in range(one):
            check(masks[one] & masks[other], q * q)
    columns = kept.view(8, -1, 128).sum((0, 1))
    spread = (p * q * 128 / (8 * n)) ** 0.5
    assert (columns / (8 * n / 128) - q).abs().max().item() < 5 * spread


def test_gradients_pass_where_numbers_do() -> None:
    x = torch.randn(4, 9, requires_grad=True)
    torch.manual_seed(0)
    y = HashedDropout(0.4)(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0) / 0.6)


def test_it_takes_the_place_of_dropout_and_draws_from_the_seed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Dropout(0.5), nn.Identity())).eval()
    hash_dropout(model)
    inner = model[1][0]
    assert type(inner) is HashedDropout
    x = torch.randn(8, 4)
    assert torch.equal(inner(x), x)  # evaluating, as before
    inner.train()
    torch.manual_seed(3)
    first = inner(x)
    assert not torch.equal(first, inner(x))
    torch.manual_seed(3)
    assert torch.equal(first, inner(x))
