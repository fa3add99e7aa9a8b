"""Where to part the layers into groups: layers that look at the same positions share a set at the least loss."""
import torch


def split_values(mass, candidates, budgets):
    """mass [layers][kv][m][n] of some queries -> [layers][layers + 1]: what a set shared by layers a to b - 1 holds of
    their mass, the best one there is, summed over the layers and averaged over KV heads, queries and `budgets`
    (positions that Top-K picks)."""
    layers, most = len(mass), min(max(budgets), mass.shape[-1])
    found = torch.zeros(layers, layers + 1)
    for a in range(layers):
        pooled = torch.zeros_like(mass[0], dtype=torch.float32)
        for b in range(a + 1, layers + 1):
            pooled += mass[b - 1]
            held = (pooled * candidates).topk(most, -1).values.cumsum(-1)
            found[a, b] = sum(float(held[..., min(k, most) - 1].mean()) for k in budgets) / len(budgets)
    return found


def best_split(value, groups):
    """First layers of the groups, and the number of layers, at the largest sum of values."""
    layers = len(value)
    sums, back = [[float("-inf")] * (layers + 1) for _ in range(groups + 1)], {}
    sums[0][0] = 0.0
    for g in range(1, groups + 1):
        for b in range(g, layers + 1):
            sums[g][b], back[g, b] = max((sums[g - 1][a] + float(value[a, b]), a) for a in range(g - 1, b))
    first = [layers]
    for g in range(groups, 0, -1):
        first.append(back[g, first[-1]])
    return first[::-1]
