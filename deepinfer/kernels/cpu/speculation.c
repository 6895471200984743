// Prompt lookup: what came after the latest of the longest earlier matches of a text's end.
#include "common.h"

// history [slots, stride] tokens; out: drafts [n, num_drafts] and match lengths [n].
EXPORT void lookup_drafts(const int32_t *history, i64 stride, const i64 *slots, const i64 *lengths, i64 n, i64 num_drafts,
                          i64 min_match, i64 max_match, i64 *drafts, i64 *matches) {
    for (i64 i = 0; i < n; i++) {
        const int32_t *text = history + slots[i] * stride;
        const i64 last = lengths[slots[i]] - 1;
        i64 best = 0, place = -1;
        for (i64 at = last - 1; at >= 0 && best < max_match; at--) {
            i64 length = 0;
            while (length < max_match && length <= at && text[at - length] == text[last - length]) length++;
            if (length > best) best = length, place = at;
        }
        const int found = best >= min_match;
        for (i64 j = 0; j < num_drafts; j++) drafts[i * num_drafts + j] = found ? text[place + 1 + j % (last - place)] : -1;
        matches[i] = found ? best : 0;
    }
}
