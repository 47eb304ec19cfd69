from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

import gossamer
from gossamer import Experiment
from gossamer.config.registry import build
from gossamer.errors import BadInput
from gossamer.runtime.setup import prepare
from gossamer.tasks import model_factory
from gossamer.tasks.models import MLP, VGG16, GNLeNet, LeNet5, ResNet18, TransformerBlock


def factory(name: str, shape: tuple[int, ...], classes: int, **parameters: object) -> Callable[[], nn.Module]:
    return model_factory(build("model", {"name": name, **parameters}), shape=shape, classes=classes)


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    ("model", "count"),
    [
        # 5*5*3*32+32 + 2*32 + 5*5*32*32+32 + 2*32 + 5*5*32*64+64 + 2*64 + 1024*10+10
        (lambda: GNLeNet((3, 32, 32)), 89_834),
        # with one colour: 1,600 less in the first layer, and 3x3 or 1x1 pixels before the last
        (lambda: GNLeNet((1, 28, 28)), 89_834 - 1600 - 64 * (16 - 9) * 10),
        (lambda: GNLeNet((1, 8, 8)), 89_834 - 1600 - 64 * (16 - 1) * 10),
        (lambda: LeNet5((1, 28, 28)), 61_706),
        (lambda: LeNet5((3, 32, 32)), 62_006),
        (lambda: VGG16((3, 32, 32), 10), 14_728_266),  # as counted by Sakarvadia et al. (2025)
        (lambda: VGG16((3, 32, 32), 100), 14_774_436),
        (lambda: ResNet18((3, 32, 32), 10), 11_173_962),
        (factory("cnn6", (3, 32, 32), 10), 5_851_338),  # as counted by Sakarvadia et al. (2025)
        # 9*(3*48 + 48*96 + 96*192 + 192*256) + 48+96+192+256 + 8*8*256*512+512 + 512*64+64 + 64*10+10
        (factory("convnet", (3, 32, 32), 10), 9_074_218),
        # torchvision's MobileNetV2 with 10 classes, and the first block's 32*32 weights and 2*32 of normalisation
        (factory("mobilenet", (3, 32, 32), 10), 2_236_682 + 32 * 32 + 2 * 32),
        # patches, token, positions; 6 layers of 6 matrices with biases and 2 normalisations; normalisation; scores
        (
            factory("vit", (3, 32, 32), 10),
            49 * 512 + 512 + 65 * 512 + 6 * (6 * 513 * 512 + 4 * 512) + 2 * 512 + 5130,
        ),
        (lambda: MLP((1, 28, 28), 10, (3136, 784, 196)), 5_076_998),
        (lambda: MLP((1, 28, 28), 10, (100,)), 784 * 100 + 100 + 100 * 10 + 10),
        (lambda: MLP((3, 32, 32), 10), 3072 * 10 + 10),
    ],
)
def test_models_have_known_parameter_counts(model, count):
    assert parameters(model()) == count


@pytest.mark.parametrize("name", ["gn-lenet", "lenet5", "mlp", "logistic"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)])
def test_models_give_one_score_per_class(name, shape):
    model = factory(name, shape, 7, **({"hidden": (16, 12)} if name == "mlp" else {}))()
    scores = model(torch.zeros(5, *shape))
    assert scores.shape == (5, 7)
    assert scores.dtype == torch.float32


@pytest.mark.parametrize("name", ["cnn6", "convnet", "mobilenet", "vit"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28)])
def test_larger_models_take_small_images(name, shape):
    assert factory(name, shape, 7)()(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    "name",
    ["resnet18", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vgg16-bn", "mobilenet", "vit"))],
)
def test_deep_models_learn_a_batch(name):
    torch.manual_seed(0)
    model = factory(name, (3, 32, 32), 7)()
    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 3, 6, 3])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(4):
        scores = model(x)
        assert scores.shape == (4, 7)
        loss = F.cross_entropy(scores, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_convnet_applies_dropout_only_in_training():
    model = factory("convnet", (1, 8, 8), 10)()
    images = torch.randn(4, 1, 8, 8)
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))


def test_transformer_block_equals_torch_encoder_layer():
    torch.manual_seed(4)
    block = TransformerBlock(12, heads=3)
    layer = nn.TransformerEncoderLayer(12, 3, 12, 0.0, F.gelu, batch_first=True, norm_first=True)
    attention = layer.self_attn
    theirs = [attention.in_proj_weight, attention.in_proj_bias]
    for module in (attention.out_proj, layer.linear1, layer.linear2, layer.norm1, layer.norm2):
        theirs += [module.weight, module.bias]
    ours = [block.inputs, block.outputs, block.perceptron[0], block.perceptron[2], block.norm1, block.norm2]
    with torch.no_grad():
        for target, value in zip([p for part in ours for p in (part.weight, part.bias)], theirs, strict=True):
            target.copy_(value)
    tokens = torch.randn(2, 5, 12)
    torch.testing.assert_close(block(tokens), layer(tokens))


def test_a_factory_makes_a_fresh_model_each_time():
    make = factory("logistic", (1, 8, 8), 10)
    torch.manual_seed(0)
    first, second = make(), make()
    assert not torch.equal(first[1].weight, second[1].weight)
    torch.manual_seed(0)
    assert torch.equal(first[1].weight, make()[1].weight)


def test_gn_lenet_matches_published_layer_order_bit_for_bit():
    torch.manual_seed(1)
    model = GNLeNet()
    images = torch.randn(4, 3, 32, 32)

    def published(x: Tensor) -> Tensor:  # decentralizepy: pool(relu(norm(conv(x))))
        for conv, norm in ((model[0], model[1]), (model[4], model[5]), (model[8], model[9])):
            x = F.max_pool2d(F.relu(norm(conv(x))), 2, 2)
        return model[-1](torch.flatten(x, 1))

    ours = model(images)
    theirs = published(images)
    assert torch.equal(ours, theirs)
    labels = torch.tensor([0, 3, 9, 9])
    gradients = torch.autograd.grad(F.cross_entropy(ours, labels), list(model.parameters()))
    expected = torch.autograd.grad(F.cross_entropy(theirs, labels), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("name", ["gn-lenet", "lenet5", "mlp", "vit"])
def test_models_work_under_vmap_with_stacked_parameters(name):
    torch.manual_seed(2)
    models = [factory(name, (1, 28, 28), 10)() for _ in range(3)]
    images, labels = torch.randn(3, 2, 1, 28, 28), torch.randint(10, (3, 2))
    stacked, _ = stack_module_state(models)

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(models[0], values, (x,)), y)

    together = vmap(grad(loss))({k: v.detach() for k, v in stacked.items()}, images, labels)
    for node, model in enumerate(models):
        F.cross_entropy(model(images[node]), labels[node]).backward()
        for key, parameter in model.named_parameters():
            torch.testing.assert_close(together[key][node], parameter.grad, rtol=1e-3, atol=1e-5)


def test_mlp_without_hidden_layers_is_linear():
    torch.manual_seed(3)
    model = MLP((4,), 3)
    x, y = torch.randn(2, 6, 4)
    torch.testing.assert_close(model(x + y) + model(torch.zeros(6, 4)), model(x) + model(y))


def test_mlp_has_relus_only_between_layers():
    model = MLP((3,), 2, (5, 4))
    names = ["Flatten", "Linear", "ReLU", "Linear", "ReLU", "Linear"]
    assert [type(layer).__name__ for layer in model] == names
    assert [layer.out_features for layer in model if isinstance(layer, nn.Linear)] == [5, 4, 2]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("lenet5", (1, 8, 8), "lenet5, for images of 8x8 pixels; accepted: 28x28 or 32x32 pixels"),
        (
            "vgg16-bn",
            (1, 28, 28),
            r"inputs of shape \[1, 28, 28\]; accepted: images .* at least 32x32 pixels",
        ),
        ("gn-lenet", (10,), r"inputs of shape \[10\]; accepted: images"),
    ],
)
def test_unsuitable_input_shapes_are_refused(name, shape, message):
    with pytest.raises(BadInput, match=f"task.model: (for )?{message}"):
        factory(name, shape, 10)()


USERS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes: int, width: int = 4, layer=nn.Linear) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), layer(shape[0] * shape[1] * shape[2], width), nn.Linear(width, classes))

    def forward(self, x):
        return self.layers(x)

def plain(classes: int = 3, **options):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes, **options))
"""


def described(model: object, **changes: object) -> Experiment:
    settings = {"nodes": 2, "task": {"name": "digits", "samples": 60, "model": model}, "topology": "complete"}
    ends = {"algorithm": "d-psgd", "stop": {"rounds": 2}, "evaluation": {"every_rounds": 2}}
    return Experiment.of({**settings, **ends, **changes})


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("users_model:Net", 64 * 4 + 4 + 4 * 10 + 10),
        ({"name": "users_model:Net", "width": 3}, 64 * 3 + 3 + 3 * 10 + 10),
        ("users_model:plain", 64 * 10 + 10),
        ({"name": "users_model:plain", "classes": 12, "bias": False}, 64 * 12),
    ],
)
def test_user_model_receives_shape_classes_and_parameters(model, count, tmp_path, monkeypatch):
    (tmp_path / "users_model.py").write_text(USERS)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = described(model)
    assert Experiment.parse(experiment.to_yaml()) == experiment
    assert prepare(experiment).layout.size == count
    run = gossamer.run(experiment, tmp_path / "runs")
    assert run.metrics.filter(round=2)["test_loss"].is_finite().all()
    sys.modules.pop("users_model")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("torch.nn:Linear", r"task.model: TypeError: .*missing 2 required|in_features: missing"),
        ({"name": "torch.nn:Softmax", "dim": 1}, "the module has no parameters"),
        ("torch.nn:no_such_layer", "'torch.nn' has no 'no_such_layer'"),
        ("digits", "task.model: unknown name 'digits'"),
        (3, "task.model: got 3; accepted: a name, or a mapping with 'name'"),
    ],
)
def test_invalid_model_reference_is_refused(model, message):
    with pytest.raises(BadInput, match=message):
        prepare(described(model))


@pytest.mark.parametrize("engine", ["simulate", "processes"])
def test_transformers_model_is_configured_by_name(engine, tmp_path):
    pytest.importorskip("transformers")
    sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 8, "intermediate_size": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 10}
    model = {"name": "transformers:ViTForImageClassification", **sizes, **heads}
    run = gossamer.run(described(model, engine=engine), tmp_path)
    recorded = run.metrics.filter(node=1, round=2)["test_loss"].item()
    task = prepare(Experiment.load(run.path / "experiment.yaml", ["evaluation.samples=null"])).task
    inputs, targets = task.test
    scores = run.module(1).eval()(inputs).logits
    assert F.cross_entropy(scores, targets).item() == pytest.approx(recorded, rel=1e-4)


@pytest.mark.parametrize(
    ("package", "model"),
    [
        ("torchvision", {"name": "torchvision.models:resnet18", "num_classes": 10}),
        ("timm", {"name": "timm:create_model", "model_name": "resnet18", "num_classes": 10, "in_chans": 1}),
    ],
)
def test_image_library_models_are_configured_by_name(package, model):
    pytest.importorskip(package)
    assert prepare(described(model)).layout.size > 11_000_000
