"""
Operators that torch has not, or has only slower or hungrier. Each is called like a torch function, and its docstring
is the plain formula that tests hold it to.
"""

import torch
import torch.nn.functional as F


def rms_norm(x, weight, eps):
    """weight * x / sqrt(mean(x²) + eps), the mean over the last dimension."""
    return FewPassRMSNorm.apply(x, weight, eps)


class FewPassRMSNorm(torch.autograd.Function):
    """Torch's own is not fused on a CPU: its backward there takes three times as long."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        mean_square = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / x.size(-1)
        scale = (mean_square + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight, scale = ctx.saved_tensors
        xhat, dxhat = x * scale, dy * weight
        along = (xhat * dxhat).mean(dim=-1, keepdim=True)  # the output does not change when x only grows
        dweight = (dy * xhat).flatten(0, -2).sum(dim=0)
        return dxhat.addcmul_(xhat, along, value=-1).mul_(scale), dweight, None


def swiglu(gate, up):
    """silu(gate) * up"""
    return SwiGLU.apply(gate, up)


class SwiGLU(torch.autograd.Function):
    """Keeps two tensors for backward and not three."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


def checkpointed(function, inputs, parameters):
    """
    function(*inputs). Only the inputs are kept: backward calls the function once more, with the same random numbers.
    The parameters are what else it reads that needs a gradient.
    """
    return Checkpointed.apply(function, len(inputs), *inputs, *parameters)


class Checkpointed(torch.autograd.Function):
    """
    Torch's own checkpoint keeps the graph, small pieces between the freed tensors that stop the C library from giving
    their place to the next ones. Its reentrant kind does not, but adds to a parameter's gradient several times per
    step, which DDP refuses.
    """

    @staticmethod
    def forward(ctx, function, n_inputs, *tensors):
        inputs, ctx.parameters = tensors[:n_inputs], tensors[n_inputs:]
        ctx.function = function
        ctx.save_for_backward(*inputs)
        device = inputs[0].device.type
        ctx.autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        ctx.random = torch if device == "cpu" else torch.get_device_module(device)
        ctx.random_state = ctx.random.get_rng_state()
        return function(*inputs)

    @staticmethod
    def backward(ctx, grad):
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in ctx.saved_tensors]
        random_state = ctx.random.get_rng_state()
        ctx.random.set_rng_state(ctx.random_state)
        with torch.enable_grad(), torch.autocast(*ctx.autocast):
            output = ctx.function(*inputs)
        ctx.random.set_rng_state(random_state)
        tensors = [*inputs, *ctx.parameters]
        grads = iter(torch.autograd.grad(output, [t for t in tensors if t.requires_grad], grad, allow_unused=True))
        return None, None, *(next(grads) if t.requires_grad else None for t in tensors)


def linear_cross_entropy(x, weight, targets):
    """
    F.cross_entropy(x @ weight.T, targets, ignore_index=-1), and 0 where all targets are ignored.
    x (N, C), weight (V, C), targets (N,)
    """
    return LinearCrossEntropy.apply(x, weight, targets, matmul_dtype(x))


class LinearCrossEntropy(torch.autograd.Function):
    """
    A few rows at a time: all logits at once would need N × V numbers. Each chunk's logits become their own gradient in
    place and are multiplied while they are there, so that backward has nothing to compute again.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, dtype):
        total, dx, dweight = 0.0, torch.empty_like(x), torch.zeros_like(weight)
        weight, low = weight.to(dtype), x.to(dtype)  # what autocast would do
        targets, ignored = without_ignored(targets)
        counted = low.masked_fill(ignored, 0)
        for rows, logits in logit_chunks(low, weight):
            losses, p = score_rows(logits, targets[rows], logits.amax(dim=1, keepdim=True))
            total += losses.masked_fill(ignored[rows], 0).sum()
            dlogits = p.scatter_add_(1, targets[rows], -torch.ones_like(losses)).to(dtype)
            dx[rows] = dlogits @ weight
            if dtype == dweight.dtype:  # no second V × C tensor
                dweight.addmm_(dlogits.T, counted[rows])
            else:
                dweight += dlogits.T @ counted[rows]
        count = (~ignored).sum().clamp(min=1)
        ctx.save_for_backward(dx.masked_fill_(ignored, 0), dweight, count)
        return total / count

    @staticmethod
    def backward(ctx, grad):
        dx, dweight, count = ctx.saved_tensors
        scale = grad / count  # here and not above, so that float16 gradients do not underflow
        return dx.mul_(scale), dweight.mul_(scale), None, None  # in place: torch refuses a second backward


def linear_scores(x, weight, targets):
    """
    The sum of the losses and the number of right predictions, as 0-d tensors: logits = x @ weight.T;
    F.cross_entropy(logits, targets, ignore_index=-1, reduction="sum"), (logits.argmax(1) == targets).sum()
    """
    dtype, loss, hits = matmul_dtype(x), 0.0, 0
    targets, ignored = without_ignored(targets)
    for rows, logits in logit_chunks(x.to(dtype), weight.to(dtype)):
        best, predicted = logits.max(dim=1, keepdim=True)
        hits += ((predicted == targets[rows]) & ~ignored[rows]).sum()
        loss += score_rows(logits, targets[rows], best)[0].masked_fill(ignored[rows], 0).sum()
    return loss, hits


def matmul_dtype(x):
    """What autocast, if it is on, makes of x in a matrix multiplication."""
    autocast = torch.is_autocast_enabled(x.device.type)
    return torch.get_autocast_dtype(x.device.type) if autocast else x.dtype


def logit_chunks(x, weight, numbers=2**24):
    """(rows, their logits, at least float32) with about `numbers` logits at a time, all in the same memory."""
    step = max(1, numbers // weight.size(0))
    buffer = x.new_empty(min(step, x.size(0)), weight.size(0))
    for start in range(0, x.size(0), step):
        rows = x[start : start + step]
        logits = torch.mm(rows, weight.T, out=buffer[: rows.size(0)])
        yield slice(start, start + step), logits.to(torch.promote_types(x.dtype, torch.float32))


def without_ignored(targets):
    """(N,) -> ids (N, 1) with 0 in place of -1, and where that was."""
    ignored = (targets == -1).unsqueeze(1)
    return targets.unsqueeze(1).masked_fill(ignored, 0), ignored


def score_rows(logits, targets, best):
    """(n, V), (n, 1), their maxima (n, 1) -> losses (n, 1), and the softmax, which takes the logits' place."""
    right = logits.gather(1, targets)
    p = torch.softmax(logits, dim=1, out=logits)
    return best - p.amax(dim=1, keepdim=True).log() - right, p  # log Σ exp from the best, whose p is never near 0
