from conformance.contract import Accelerator as Accelerator
from conformance.contract import Arithmetic as Arithmetic
from conformance.contract import Implementation as Implementation
from conformance.execution.plain_functions import declare as declare
from conformance.reference.attention import reference_attention as reference_attention
