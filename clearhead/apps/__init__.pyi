from . import check as check
from . import surgery as surgery
