"""The interface that checks are written against: `Subject`, `Judgement`, `Scope` and `Rotation`."""
