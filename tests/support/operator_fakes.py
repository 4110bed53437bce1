"""Operators of a topology without Spark: a scope, a way to executors that drops all, and a coordinator with a text as its state."""

import stagecrew


class DroppingWire:
    """A way to executors that drops all."""

    def send(self, executor, frame):
        pass

    def dirty(self, gateway):
        while gateway.take() is not None:
            pass

    def flush(self):
        pass


class FakeTopology:
    """A topology without Spark."""

    name = id = "load"
    is_active = True

    def cancel_failed(self, cause):
        raise cause


class TextCoordinator(stagecrew.Coordinator):
    """Has a text as its state."""

    def __init__(self, context, made):
        super().__init__(context)
        self.text = ""
        made.append(self)

    def checkpoint(self, checkpoint_id):
        return self.text.encode()

    def reset_to_checkpoint(self, checkpoint_id, state):
        self.text = (state or b"").decode()
