"""`python -m train`: generate dialogues, train on them, save the model, score it on held-out dialogues."""

from train.run import main

if __name__ == "__main__":
    main()
