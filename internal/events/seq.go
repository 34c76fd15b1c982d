package events

import "strconv"

// Seq is the position of an event in its session: 0, 1, 2, … without holes.
// It is never JetStream's stream sequence, which is sparse per session.
type Seq int64

const (
	// NoSeq is the seq of an empty session's last event.
	NoSeq Seq = -1
	// MaxSeq is the largest seq (and time) that an event may carry: 2^53-1, the
	// largest integer that every JSON reader keeps exactly.
	MaxSeq Seq = 1<<53 - 1
)

// String returns the seq in decimal.
func (s Seq) String() string { return strconv.FormatInt(int64(s), 10) }

// parseInteger reads a JSON number token whose value is an integer from 0 to MaxSeq,
// however it is written: 2, 2.0 and 2e0 are the same. It refuses -0, fractions and
// anything that is not a number.
func parseInteger(tok []byte) (int64, bool) {
	i, n := 0, int64(0)
	for i < len(tok) && i < 17 && isDigit(tok[i]) {
		n = n*10 + int64(tok[i]-'0')
		i++
	}
	switch i {
	case 0:
		return 0, false
	case len(tok):
		return n, n <= int64(MaxSeq)
	}
	return parseDecimal(tok)
}

// parseDecimal is the slow half of parseInteger: a fraction part, an exponent, or too many digits.
func parseDecimal(tok []byte) (int64, bool) {
	neg, digits, exp, ok := decimal(tok)
	switch {
	case !ok || neg || exp < 0:
		return 0, false
	case len(digits) == 0:
		return 0, true
	case len(digits)+exp > 16:
		return 0, false
	}
	n := int64(0)
	for _, d := range digits {
		n = n*10 + int64(d-'0')
	}
	for ; exp > 0; exp-- {
		n *= 10
	}
	return n, n <= int64(MaxSeq)
}

// decimal takes a JSON number token apart: value = ±digits × 10^exp, with digits free of
// leading and trailing zeros (empty for zero). ok is false when tok is no number, or not zero
// with an exponent beyond a million.
func decimal(tok []byte) (neg bool, digits []byte, exp int, ok bool) {
	i := 0
	if i < len(tok) && tok[i] == '-' {
		neg = true
		i++
	}
	start := i
	for i < len(tok) && isDigit(tok[i]) {
		i++
	}
	if i == start {
		return false, nil, 0, false
	}
	digits = append(digits, tok[start:i]...)
	if i < len(tok) && tok[i] == '.' {
		i++
		start = i
		for i < len(tok) && isDigit(tok[i]) {
			i++
		}
		if i == start {
			return false, nil, 0, false
		}
		digits = append(digits, tok[start:i]...)
		exp = -(i - start)
	}
	huge := false
	if i < len(tok) && (tok[i] == 'e' || tok[i] == 'E') {
		i++
		sign := 1
		if i < len(tok) && (tok[i] == '+' || tok[i] == '-') {
			if tok[i] == '-' {
				sign = -1
			}
			i++
		}
		e := 0
		start = i
		for i < len(tok) && isDigit(tok[i]) {
			if !huge {
				e = e*10 + int(tok[i]-'0')
				huge = e > 1_000_000
			}
			i++
		}
		if i == start {
			return false, nil, 0, false
		}
		exp += sign * e
	}
	if i != len(tok) {
		return false, nil, 0, false
	}
	for len(digits) > 0 && digits[0] == '0' {
		digits = digits[1:]
	}
	for len(digits) > 0 && digits[len(digits)-1] == '0' {
		digits = digits[:len(digits)-1]
		exp++
	}
	if len(digits) == 0 {
		return neg, nil, 0, true
	}
	return neg, digits, exp, !huge
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }
