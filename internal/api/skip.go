package api

import (
	"net/http"

	"palimpsest/internal/projection"
)

// maxSkipBody is the largest body of a skip, in bytes.
const maxSkipBody = 16 << 10

// skip leaves a session in quarantine as it is.
func (s *projectorAPI) skip(w http.ResponseWriter, r *http.Request, id string) error {
	if q := readQuery(r); q.err != nil {
		return q.err
	}
	if _, err := contentType(r.Header.Get("Content-Type"), []string{typeJSON}); err != nil {
		return err
	}
	if err := plain(w, r); err != nil {
		return err
	}
	body, err := readBody(w, r, maxSkipBody, s.cfg.BodyTime)
	if err != nil {
		return err
	}
	m, err := members(body, "by", "reason")
	if err != nil {
		return err
	}
	var by, reason string
	if by, err = stringMember(m, "by"); err == nil {
		reason, err = stringMember(m, "reason")
	}
	if err != nil {
		return err
	}
	q, err := s.r.Skip(r.Context(), id, by, reason)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, q)
}

// apart tells records that ask for attention from those that somebody decided to leave.
func apart(all []projection.Quarantine) (quarantined, skipped []projection.Quarantine) {
	quarantined, skipped = []projection.Quarantine{}, []projection.Quarantine{}
	for _, q := range all {
		if q.Alerts() {
			quarantined = append(quarantined, q)
		} else {
			skipped = append(skipped, q)
		}
	}
	return quarantined, skipped
}
