import dataclasses
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optg.methods import METHODS
from optg.training import recipe
from optg.training.recipe import Plan, Recipe, RecipeError, build_method


def test_recipes_have_the_settings_of_the_paper_and_of_the_authors_code():
    paper, authors = recipe.load("vgg19-cifar10").recipe, recipe.load("vgg19-cifar10:authors").recipe
    assert (paper.epochs, paper.lr, paper.weight_decay, paper.batch_size, paper.warmup) == (160, 0.1, 1e-3, 256, 0.0)
    assert (authors.epochs, authors.lr, authors.weight_decay, authors.batch_size, authors.warmup) == (160, 0.1, 5e-4, 256, 5.0)
    assert build_method(recipe.load("vgg19-cifar10:authors")).alpha == 1.0
    assert build_method(recipe.load("vgg19-cifar10")).alpha is None
    assert recipe.load("vgg19-cifar10:authors").methods["rigl"] == recipe.load("vgg19-cifar10").methods["rigl"]
    imagenet = recipe.load("resnet50-imagenet").recipe
    assert (imagenet.epochs, imagenet.weight_decay, imagenet.label_smoothing) == (100, 5e-4, 0.0)
    mobilenet = recipe.load("mobilenet_v1-imagenet").recipe
    assert (mobilenet.epochs, mobilenet.weight_decay) == (180, 4e-5)


def test_the_recipe_of_phoenix_holds_its_learning_rate():
    plan = recipe.load("vgg19-cifar100:phoenix")
    assert (plan.method, plan.recipe.schedule, plan.recipe.hold, plan.recipe.epochs) == ("phoenix", "hold", 0.5, 160)
    assert build_method(plan) == METHODS["phoenix"]()


@pytest.mark.parametrize("name", recipe.names())
def test_every_recipe_is_unchanged_by_writing_and_reading(name):
    plan = recipe.load(name)
    again = recipe.read(recipe.dump(plan), "copy", plan.name)
    assert again == plan
    for method in plan.methods:
        build_method(dataclasses.replace(plan, method=method))


@pytest.mark.parametrize("name", recipe.names())
def test_grasp_sees_ten_images_of_each_class(name):
    plan = dataclasses.replace(recipe.load(name), method="grasp")
    classes = {"digits": 10, "cifar10": 10, "cifar100": 100, "imagenet": 1000}[plan.recipe.data]
    assert build_method(plan).batches * plan.recipe.batch_size >= 10 * classes


@pytest.mark.parametrize("method", METHODS)
def test_options_that_are_none_are_unchanged_by_writing_and_reading(method):
    options = {f.name: None for f in dataclasses.fields(METHODS[method]) if f.name in ("alpha", "theta", "decay")}
    if method in ("supermask", "sr-ste"):
        options.pop("decay")  # never None there
    plan = Plan(Recipe(), method, {method: options})
    assert build_method(recipe.read(recipe.dump(plan), "copy", "recipe")) == METHODS[method](**options)


@pytest.mark.parametrize(
    "text, message",
    [
        ("lr = 0.1 0.2", "is not valid TOML"),
        ("learning_rate = 0.1", "unknown setting 'learning_rate'"),
        ("epoch = 3", "unknown setting 'epoch'; did you mean 'epochs'?"),
        ('lr = "fast"', "lr is 'fast'; expected float"),
        ("epochs = 2.5", "epochs is 2.5; expected int"),
        ("nesterov = 1", "nesterov is 1; expected bool"),
        ('schedule = "cosin"', "schedule is 'cosin'; expected one of cosine, multistep, hold, constant"),
        ("milestones = 0.5", "milestones is 0.5; expected a list of numbers"),
        ("milestones = [0.5, 1.5]", "milestones is (0.5, 1.5); expected fractions of training"),
        ("sparsity = 95", "sparsity is 95.0; expected at least 0 and below 1"),
        ("sparsity = -0.1", "sparsity is -0.1"),
        ("epochs = 0", "epochs is 0; expected at least 1"),
        ("batch_size = 0", "batch_size is 0"),
        ("epochs = 10000000000000000000", "epochs is 10000000000000000000; expected at least 1 and below 2^31"),
        ("max_steps = 10000000000000000000", "max_steps is 10000000000000000000; expected at least 1 and below 2^63"),
        ("weight_decay = inf", "weight_decay is inf; expected at least 0"),
        ("lr = 0", "lr is 0.0; expected above 0"),
        ("lr = inf", "lr is inf"),
        ("momentum = 1", "momentum is 1.0; expected at least 0 and below 1"),
        ("weight_decay = -1e-3", "weight_decay is -0.001"),
        ("warmup = 30", "warmup is 30.0; expected at least 0 and below epochs"),
        ("cycles = 0", "cycles is 0"),
        ("hold = 1.0", "hold is 1.0"),
        ("label_smoothing = 1.0", "label_smoothing is 1.0"),
        ("accumulate = 3", "accumulate is 3; expected a divisor of batch_size, 64"),
        ("nesterov = true\nmomentum = 0.0", "nesterov is True; expected false if momentum is 0"),
        ("folder = 3", "folder is 3; expected str or none"),
        ("methods = 3", "methods must be a table of options per method"),
        ("variants = 3", "variants must be a table of settings per variant"),
        ("method = 3", "method is 3; expected a name"),
        ("[methods.opgt]\nalpha = 1.0", "[methods.opgt] names an unknown method; did you mean 'optg'?"),
        ("gamma = nan", "gamma is nan; expected above 0"),
        ("seed = 99999999999999999999", "seed is 99999999999999999999; expected at least 0"),
    ],
)
def test_errors_in_a_recipe_say_what_and_where(text, message):
    with pytest.raises(RecipeError) as caught:
        recipe.read(text, "my.toml", "my")
    assert message in str(caught.value) and "my.toml" in str(caught.value)


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("rigle", {}, "unknown method 'rigle'; did you mean 'rigl'?"),
        ("rigl", {"fractoin": 0.3}, "rigl has no option 'fractoin'; did you mean 'fraction'?"),
        ("rigl", {"fraction": "much"}, "rigl.fraction is 'much'; expected float"),
        ("rigl", {"every": 0.5}, "rigl.every is 0.5; expected int or str"),
        ("optg", {"score_lr": "wait"}, "optg.score_lr is 'wait'; expected 'sparsity', 'weight' or float"),
    ],
)
def test_wrong_method_options_are_refused(method, options, message):
    with pytest.raises(RecipeError) as caught:
        build_method(Plan(Recipe(), method, {method: options}))
    assert message in str(caught.value)


def test_unknown_recipes_are_refused():
    with pytest.raises(RecipeError, match="unknown recipe 'vgg19-cifar1'; did you mean 'vgg19-cifar10'"):
        recipe.load("vgg19-cifar1")
    with pytest.raises(RecipeError, match="there is no recipe file"):
        recipe.load("nowhere/recipe.toml")


def test_a_method_uses_the_seed_of_the_run():
    plan = Plan(Recipe(seed=3), "set")
    assert build_method(plan).seed == 3
    plan.methods["set"] = {"seed": 7}
    assert build_method(plan).seed == 7


def toml_values():
    plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text() | st.dates()
    return st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)


@given(st.dictionaries(st.text(), toml_values()), st.text(min_size=1))
def test_any_text_is_unchanged_by_writing_and_reading(options, folder):
    plan = Plan(Recipe(folder=folder, model_options=options))
    again = tomllib.loads(recipe.dump(plan))
    assert again["folder"] == folder and again.get("model_options", {}) == without_none(options)


def without_none(value):
    """Return a value with "none" for None, which TOML does not have."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items()}
    return [without_none(inner) for inner in value] if isinstance(value, list) else "none" if value is None else value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("milestones = " + "[" * 100_000, r"^it is not valid TOML: "),
        ("lr = " + "1" * 400, r"^it: lr has 400 digits; expected at most 30"),
        ("lr = " + "1" * 5000, r"^it is not valid TOML: "),
        ("epochs = " + "1" * 400, r"^it: epochs has 400 digits; expected at most 30"),
        ("[methods.gmp]\nevery = " + "1" * 400, r"gmp.every has 400 digits; expected at most 30"),
    ],
)
def test_a_hostile_recipe_is_refused(text, message):
    with pytest.raises(RecipeError, match=message):
        build_method(dataclasses.replace(recipe.read(text, "it", "it"), method="gmp"), "it")
