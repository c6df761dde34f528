"""What docs/howto/forwarding.md uses of Weights & Biases."""

runs = []


class Run:
    def __init__(self, project):
        self.project = project
        self.alerts = []
        self.summary = {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def alert(self, title, text, level=None, wait_duration=None):
        assert isinstance(title, str)
        assert isinstance(text, str)
        self.alerts.append((title, text))


def init(entity=None, project=None):
    runs.append(Run(project))
    return runs[-1]
