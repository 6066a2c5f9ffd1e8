from optg.report.paper import find_table, tables


def test_the_papers_tables():
    assert [(t.name, t.data, len(t.points)) for t in tables()] == [
        ("Tab. 1", "cifar10", 19),
        ("Tab. 1", "cifar100", 19),
        ("Tab. 2", "imagenet", 32),
        ("Tab. 3", "imagenet", 10),
    ]
    resnet = find_table("resnet50", "imagenet")
    assert resnet.at("optg", 0.98).accuracy == 0.672 and resnet.at("optg", 0.98).flops == 126e6
    assert resnet.at("str", 0.99).sparsity == 0.9898  # the nearest sparsity
    assert resnet.at("optg", 0.97) is None and resnet.at("feather", 0.9) is None and resnet.at("dense", 0.0).accuracy == 0.7701
    assert find_table("vgg19-maxpool", "cifar10") is find_table("vgg19", "cifar10") and find_table("vgg19", "digits") is None
