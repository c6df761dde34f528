"""Text classification with an Embedding: short reviews, kind or unkind.

A row of the embedding that no word of the batch used gets no gradient; that is healthy, and the
guard is silent. ``python examples/text_classification.py --faulty`` makes a mistake that many
make: softmax over a single unit, which is 1 whatever the text says.
"""

import argparse

import keras
import numpy as np
from keras import layers

from keras_gradguard import GradientGuard

OPENINGS = ["the film was", "this story is", "I found the acting", "the music is", "it was all"]
KIND = ["wonderful", "moving and clever", "warm", "a joy", "brilliant", "full of life"]
UNKIND = ["dull", "a waste of time", "clumsy", "noisy and empty", "painful", "badly cut"]
ENDINGS = ["", "from start to end", "in my opinion", "and I would say so again", "really"]


def reviews(count=640):
    """Return ``count`` sentences and 1.0 for each kind one."""
    rng = np.random.default_rng(0)
    kind = rng.integers(0, 2, count)
    texts = [
        " ".join([rng.choice(OPENINGS), rng.choice(KIND if k else UNKIND), rng.choice(ENDINGS)])
        for k in kind
    ]
    return np.array(texts), kind.astype("float32")[:, None]


def build(words, faulty):
    last = (
        layers.Dense(1, activation="softmax", name="kind")  # of one unit: always 1
        if faulty
        else layers.Dense(1, activation="sigmoid", name="kind")
    )
    model = keras.Sequential(
        [
            keras.Input((None,), dtype="int64"),
            layers.Embedding(words, 16, mask_zero=True, name="words"),
            layers.GlobalAveragePooling1D(),
            layers.Dense(16, activation="relu", name="hidden"),
            last,
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01),
        "mse" if faulty else "binary_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main(faulty=False):
    keras.utils.set_random_seed(0)
    texts, kind = reviews()
    vectorize = layers.TextVectorization(max_tokens=200)
    vectorize.adapt(texts)
    x = np.asarray(vectorize(texts))
    model = build(vectorize.vocabulary_size(), faulty)
    guard = GradientGuard(log_dir=None)
    model.fit(x[:512], kind[:512], epochs=4, verbose=2, callbacks=[guard])
    accuracy = model.evaluate(x[512:], kind[512:], verbose=0)[1]
    print(f"accuracy {accuracy:.3f} on reviews it never saw")
    return accuracy, guard


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Short reviews, kind or unkind.")
    parser.add_argument("--faulty", action="store_true", help="softmax over one unit")
    main(parser.parse_args().faulty)
